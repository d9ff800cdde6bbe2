"""Collectives on TensorFlow's tensors, with gradients, eagerly and inside ``tf.function``.

The gradients follow Horovod's convention; they are those of ``torch.differentiable``.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ..core.process_sets import ProcessSet, global_process_set
from ..core.requests import ReduceOp
from ..torch import differentiable as torch_ops
from ..torch.basics import Average, Sum
from ..torch.basics import local_rank as own_local_rank
from ..torch.basics import local_size as own_local_size
from ..torch.basics import rank as own_rank
from ..torch.basics import size as own_size
from ..torch.compression import Compression
from ..torch.submission import reduce_op
from .host_calls import call_on_host, specs_of
from .library import tf

Tensors = Sequence[torch.Tensor]


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Return a tensor reduced over all ranks, by default their average.

    ``tf.IndexedSlices`` are gathered from all ranks: together they are the sum.

    Args:
        average: Deprecated: use ``op``.
        device_dense, device_sparse, ignore_name_scope: Not used.
        compression: hvd.Compression.none or hvd.Compression.fp16.
        op: hvd.Average, Sum, Min, Max, Product or Adasum.
        prescale_factor, postscale_factor: Factors before and after the reduction.
        name: Name that is the same on all ranks.

    Raises:
        ValueError: The tensor can't be reduced, or this rank is not in the process set.
        HorovodInternalError: Ranks disagree about the operation, or a rank has ended.
    """
    how, factors = reduce_op(op, average), (prescale_factor, postscale_factor)
    if isinstance(tensor, tf.IndexedSlices):
        return _allreduce_slices(tensor, how, factors, name, process_set)

    def forward(own: torch.Tensor) -> Tensors:
        return [torch_ops.allreduce(own, None, name, compression, how, *factors, process_set)]

    return _allreduced([tensor], forward, (how, *factors, process_set))[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Return tensors reduced over all ranks, which are exchanged together."""
    how, factors = reduce_op(op, average), (prescale_factor, postscale_factor)
    sparse = {i: one for i, one in enumerate(tensors) if isinstance(one, tf.IndexedSlices)}
    dense = [one for i, one in enumerate(tensors) if i not in sparse]

    def forward(*own: torch.Tensor) -> Tensors:
        return torch_ops.grouped_allreduce(own, None, name, compression, how, *factors, process_set)

    found = iter(_allreduced(dense, forward, (how, *factors, process_set)) if dense else ())
    return [
        _allreduce_slices(sparse[i], how, factors, name and f"{name}.{i}", process_set)
        if i in sparse
        else next(found)
        for i in range(len(tensors))
    ]


def _allreduced(tensors: Sequence[Any], forward: Any, arguments: tuple[Any, ...]) -> list[Any]:
    context = SimpleNamespace(arguments=arguments)

    def backward(upstream: Tensors, *_: Tensors) -> Tensors:
        return torch_ops.HorovodAllreduce.backward(context, *upstream)[4:]  # type: ignore[no-any-return]

    return _run(tensors, forward, backward, specs_of)


def _allreduce_slices(
    slices: Any,
    how: ReduceOp,
    factors: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
) -> Any:
    if how not in (Average, Sum):
        raise NotImplementedError(
            f"op={how.name.capitalize()} is not possible for tf.IndexedSlices. HINT: "
            "op=hvd.Average or op=hvd.Sum, or sparse_as_dense=True"
        )
    values = allgather(slices.values, name and f"{name}.values", process_set=process_set)
    indices = allgather(slices.indices, name and f"{name}.indices", process_set=process_set)
    factor = factors[0] * factors[1]
    if how == Average:
        factor /= process_set.size() or 1
    if factor != 1:
        values = values * tf.cast(factor, values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the ranks' tensors concatenated; they may differ in the first dimension."""
    return _allgathered(
        [tensor], process_set, lambda own: [torch_ops.allgather(own, name, process_set)]
    )[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return each tensor concatenated over all ranks; they are exchanged together."""
    return _allgathered(
        tensors, process_set, lambda *own: torch_ops.grouped_allgather(own, name, process_set)
    )


def _allgathered(tensors: Sequence[Any], process_set: ProcessSet, forward: Any) -> list[Any]:
    def backward(upstream: Tensors, own: Tensors, *_: Tensors) -> Tensors:
        context = SimpleNamespace(process_set=process_set, rows=[len(one) for one in own])
        return torch_ops.HorovodAllgather.backward(context, *upstream)[2:]  # type: ignore[no-any-return]

    return _run(tensors, forward, backward, _uneven_specs)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensor of the global rank ``root_rank``."""

    def forward(own: torch.Tensor) -> Tensors:
        return [torch_ops.broadcast(own, root_rank, name, process_set)]

    def backward(upstream: Tensors, *_: Tensors) -> Tensors:
        context = SimpleNamespace(root_rank=root_rank, process_set=process_set)
        return torch_ops.HorovodBroadcast.backward(context, *upstream)[:1]  # type: ignore[no-any-return]

    return _run([tensor], forward, backward, specs_of)[0]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of the tensor to each rank, and return the received rows in rank order.

    With ``splits`` (rows for each rank) also return how many rows came from each rank.
    """
    given = [] if splits is None else [tf.convert_to_tensor(splits, tf.int32)]

    def forward(own: torch.Tensor, *own_splits: torch.Tensor) -> Tensors:
        rows = own_splits[0] if own_splits else None
        result = torch_ops.alltoall(own, rows, name, process_set)
        return list(result) if own_splits else [result, _even(result, process_set)]

    def backward(upstream: Tensors, own: Tensors, results: Tensors) -> Tensors:
        context = SimpleNamespace(
            process_set=process_set, received_splits=results[1], rows=len(own[0])
        )
        sent = torch_ops.HorovodAlltoall.backward(context, upstream[0])[0]
        return [sent, *[torch.zeros_like(one) for one in own[1:]]]

    def specs(tensors: Sequence[Any]) -> list[Any]:
        return [*_uneven_specs(tensors[:1]), tf.TensorSpec([process_set.size()], tf.int32)]

    received, received_splits = _run([tensor, *given], forward, backward, specs, True)
    return received if splits is None else (received, received_splits)


def _even(received: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """Return the rows that came from each rank where all send equally many to this one."""
    size = process_set.size() or 1
    return torch.full((size,), len(received) // size, dtype=torch.int32)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
) -> Any:
    """Return this rank's part (of the first dimension) of the tensor reduced over all ranks."""
    return grouped_reducescatter(
        [tensor], "", compression, op, process_set, prescale_factor, postscale_factor, name=name
    )[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Return this rank's part of each tensor reduced over all ranks, exchanged together."""
    factors = (prescale_factor, postscale_factor)

    def forward(*own: torch.Tensor) -> Tensors:
        return torch_ops.grouped_reducescatter(own, name, compression, op, process_set, *factors)

    def backward(upstream: Tensors, *_: Tensors) -> Tensors:
        factor = factors[0] * factors[1]
        if reduce_op(op, None) == Sum:
            factor *= process_set.size() or 1
        context = SimpleNamespace(process_set=process_set, factor=factor)
        return torch_ops.HorovodReducescatter.backward(context, *upstream)[4:]  # type: ignore[no-any-return]

    return _run(tensors, forward, backward, _uneven_specs)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks, as a tensor that is computed when the graph runs."""
    return _number(own_size)


def rank_op(name: str | None = None) -> Any:
    """Return the global rank, as a tensor that is computed when the graph runs."""
    return _number(own_rank)


def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks on the node, computed when the graph runs."""
    return _number(own_local_size)


def local_rank_op(name: str | None = None) -> Any:
    """Return the rank within the node, computed when the graph runs."""
    return _number(own_local_rank)


def _number(function: Callable[[], int]) -> Any:
    def call() -> Tensors:
        return [torch.tensor(function(), dtype=torch.int32)]

    return call_on_host(call, [], [tf.TensorSpec([], tf.int32)], is_ordered=False)[0]


def _uneven_specs(tensors: Sequence[Any]) -> list[Any]:
    """Return the specs of results whose first dimension is known when they are computed."""
    return [
        tf.TensorSpec([None, *tensor.shape[1:]] if tensor.shape.rank else None, tensor.dtype)
        for tensor in tensors
    ]


def _run(
    tensors: Sequence[Any],
    forward: Callable[..., Tensors],
    backward: Callable[..., Tensors],
    specs: Callable[[Sequence[Any]], list[Any]],
    keeps_results: bool = False,
) -> list[Any]:
    """Run a collective that has a gradient.

    Args:
        forward: Returns the results from the tensors, all of torch.
        backward: Returns the gradients from those of the results, the tensors, and the results.
        specs: Returns the specs of the results.
        keeps_results: Whether ``backward`` needs the results; otherwise it gets none.
    """
    own = [tf.convert_to_tensor(tensor) for tensor in tensors]

    def run(*own: Any) -> Any:
        results = call_on_host(forward, own, specs(own))
        kept = results if keeps_results else []

        def gradient(*upstream: Any) -> list[Any]:
            up = [
                tf.zeros_like(result) if one is None else tf.convert_to_tensor(one)
                for one, result in zip(upstream, results, strict=True)
            ]

            def call(*given: torch.Tensor) -> Tensors:
                first, second = len(up), len(up) + len(own)
                return [
                    one.contiguous()
                    for one in backward(given[:first], given[first:second], given[second:])
                ]

            return call_on_host(call, [*up, *own, *kept], specs_of(own))

        return results, gradient

    return list(tf.custom_gradient(run)(*own))
