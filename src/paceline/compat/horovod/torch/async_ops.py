"""Asynchronous operations of ``horovod.torch.mpi_ops``: they return handles.

Unless a call says otherwise, ``name`` must be the same on all ranks and different from those of
other operations in progress, and shape and dtype of the tensor must be the same on all ranks.
"""

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core import world
from ..core.coordinator import Coordinator
from ..core.operation import Operation
from ..core.process_sets import ProcessSet, global_process_set
from ..core.requests import Kind, ReduceOp, Request
from .basics import Adasum, Average, Sum

_unnamed: Counter[tuple[int | None, str]] = Counter()  # calls without a name
_last_handle = itertools.count(1)
_handles: dict[int, tuple[Coordinator, Operation, Callable[[Operation], Any]]] = {}
_NOT_REDUCED = (torch.bool, torch.complex64, torch.complex128)


def reduce_op(op: Any, average: bool | None) -> ReduceOp:
    """Return the reduction of the arguments ``op`` and ``average`` (deprecated)."""
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if average is not None:
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed in v1.0. HINT: "
            "op=hvd.Average or op=hvd.Sum",
            DeprecationWarning,
            stacklevel=4,
        )
        return Average if average else Sum
    if op is None:
        return Average
    try:
        return ReduceOp(op)
    except ValueError:
        raise ValueError(
            f"op={op!r} is not a reduction. HINT: hvd.Average, hvd.Sum, hvd.Min, hvd.Max, "
            "hvd.Product or hvd.Adasum"
        ) from None


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduce a tensor over all ranks; ``synchronize`` returns the result."""
    factors = (prescale_factor, postscale_factor)
    return _allreduce(
        "allreduce", [tensor], None, name, reduce_op(op, average), factors, process_set, _only
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduce a tensor over all ranks in place."""
    factors = (prescale_factor, postscale_factor)
    return _allreduce(
        "allreduce", [tensor], [tensor], name, reduce_op(op, average), factors, process_set, _only
    )


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduce tensors over all ranks, together; ``synchronize`` returns their results."""
    factors = (prescale_factor, postscale_factor)
    name, how = name, reduce_op(op, average)
    return _allreduce(
        "grouped_allreduce", list(tensors), None, name, how, factors, process_set, _all
    )


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduce tensors over all ranks in place, together."""
    factors = (prescale_factor, postscale_factor)
    inputs, how = list(tensors), reduce_op(op, average)
    return _allreduce("grouped_allreduce", inputs, inputs, name, how, factors, process_set, _all)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str,
    op: Any,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Sum sparse tensors over all ranks, or average them.

    Returns:
        A function that waits for the result and returns it. ``synchronize`` calls it as well.
    """
    how = reduce_op(op, None)
    if how not in (Average, Sum):
        raise ValueError(
            f"sparse_allreduce_async: op={how.name.capitalize()} is not possible for sparse "
            "tensors. HINT: op=hvd.Average or op=hvd.Sum"
        )
    indices = tensor._indices().transpose(0, 1).contiguous()
    indices_handle = allgather_async(indices, f"{name}.indices", process_set)
    values_handle = allgather_async(tensor._values(), f"{name}.values", process_set)

    def result() -> torch.Tensor:
        values, all_indices = synchronize(values_handle), synchronize(indices_handle)
        if how == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(
            all_indices.transpose(0, 1), values, tensor.size(), check_invariants=False
        )

    return result


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Concatenate the ranks' tensors, which may differ in the first dimension."""
    return _submit_gather("allgather", [tensor], name, process_set, _only)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Concatenate each of several tensors over all ranks."""
    return _submit_gather("grouped_allgather", list(tensors), name, process_set, _all)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Broadcast the tensor of the global rank ``root_rank``; ``synchronize`` returns it."""
    return _broadcast(tensor, None, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Replace the tensor by that of the global rank ``root_rank``."""
    return _broadcast(tensor, tensor, root_rank, name, process_set)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Send rows of the tensor to each rank.

    ``synchronize`` returns the received rows in rank order, and their number from each rank.

    Args:
        splits: Rows for each rank: a tensor of int32, or a list. Default: equally many.

    Raises:
        ValueError: The splits do not fit the tensor or the number of ranks.
    """
    coordinator = _coordinator(process_set)
    checked = _checked("alltoall", [tensor])
    rows = _rows_for_ranks(tensor, splits, coordinator.size)
    device = splits.device if isinstance(splits, torch.Tensor) else "cpu"

    def result(operation: Operation) -> Any:
        assert operation.outputs is not None
        received = torch.tensor(operation.received_splits, dtype=torch.int32, device=device)
        return operation.outputs[0], received

    request = _request("alltoall", Kind.ALLTOALL, checked, name, process_set)
    return _submit(Operation(request, checked, splits=rows), process_set, result)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Reduce a tensor over all ranks; each rank receives its part of the first dimension."""
    factors = (prescale_factor, postscale_factor)
    return _reducescatter("reducescatter", [tensor], name, op, factors, process_set, _only)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Reduce and scatter several tensors, together."""
    factors = (prescale_factor, postscale_factor)
    kind = "grouped_reducescatter"
    return _reducescatter(kind, list(tensors), name, op, factors, process_set, _all)


def poll(handle: Any) -> bool:
    """Return whether ``synchronize(handle)`` returns without waiting."""
    return handle not in _handles or _handles[handle][1].is_done


def synchronize(handle: Any) -> Any:
    """Wait for an operation, and return its result; None for a handle that was waited for before.

    Raises:
        HorovodInternalError: Ranks disagree about the operation, or a rank has ended.
    """
    if callable(handle):
        return handle()
    entry = _handles.pop(handle, None)
    if entry is None:
        return None
    coordinator, operation, result = entry
    coordinator.wait(operation)
    return result(operation)


def join(device: int = -1) -> int:
    """Contribute zeros to the other ranks' all-reduces until all ranks have called ``join``.

    Args:
        device: Not used: zeros are made on the device of the other ranks' tensors.

    Returns:
        The rank that joined last.
    """
    return _coordinator(global_process_set).join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have called it."""
    request = _request("barrier", Kind.BARRIER, [], None, process_set)
    synchronize(_submit(Operation(request), process_set, lambda _: None))


# Implementation.


def _only(operation: Operation) -> Any:
    assert operation.outputs is not None
    return operation.outputs[0]


def _all(operation: Operation) -> Any:
    return operation.outputs


def _coordinator(process_set: ProcessSet) -> Coordinator:
    if not world.is_initialized():
        raise world.not_initialized()
    return world.current_world().coordinator_of(process_set)


def _submit(
    operation: Operation, process_set: ProcessSet, result: Callable[[Operation], Any]
) -> int:
    coordinator = world.submit(operation, process_set)
    handle = next(_last_handle)
    _handles[handle] = (coordinator, operation, result)
    return handle


def _request(
    prefix: str,
    kind: Kind,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    **more: Any,
) -> Request:
    """Return a request; calls without a name are numbered, in each process set by itself."""
    if name is None:
        counted = (process_set.process_set_id, prefix)
        _unnamed[counted] += 1
        unique = f"{prefix}.noname.{_unnamed[counted]}"
    else:
        unique = f"{prefix}.{name}"
    return Request(
        unique,
        kind,
        tuple(tuple(one.shape) for one in tensors),
        tuple(str(one.dtype)[6:] for one in tensors),
        tensors[0].device.type if tensors else "cpu",
        is_named=name is not None,
        **more,
    )


def _checked(prefix: str, tensors: Sequence[Any], reduces: bool = False) -> list[torch.Tensor]:
    """Return the tensors as buffers without gradients.

    Raises:
        ValueError: They can't be exchanged.
    """
    if not tensors:
        raise ValueError(f"{prefix}: the list of tensors is empty. HINT: pass at least one")
    buffers = []
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{prefix}: {type(tensor).__name__} is not a tensor. HINT: torch.as_tensor(...)"
            )
        if tensor.layout != torch.strided:
            raise ValueError(
                f"{prefix}: tensor of layout {tensor.layout}. HINT: hvd.sparse_allreduce_async, or "
                "tensor.to_dense()"
            )
        if reduces and tensor.dtype in _NOT_REDUCED:
            raise ValueError(
                f"{prefix}: Tensor type {tensor.type()} is not supported. HINT: "
                + ("tensor.to(torch.uint8)" if tensor.dtype == torch.bool else "view_as_real")
            )
        if not tensor.is_contiguous() and not any(
            tensor.dim() == dims and tensor.is_contiguous(memory_format=layout)
            for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d))
        ):
            raise ValueError(
                f"{prefix}: Tensor is required to be contiguous, or channel_last. HINT: "
                "tensor.contiguous()"
            )
        buffers.append(tensor.detach())
    return buffers


def _allreduce(
    prefix: str,
    tensors: list[torch.Tensor],
    outputs: list[torch.Tensor] | None,
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    result: Callable[[Operation], Any],
) -> int:
    """Submit an all-reduce. outputs: None for new tensors."""
    _coordinator(process_set)
    if op == Adasum:
        world.check_adasum(process_set)
    inputs = _checked(prefix, tensors, reduces=True)
    results = [torch.empty_like(one) for one in inputs] if outputs is None else inputs
    scale = dict(zip(("prescale", "postscale"), map(float, factors), strict=True))
    request = _request(prefix, Kind.ALLREDUCE, inputs, name, process_set, op=op, **scale)

    def given(operation: Operation) -> Any:
        if outputs is not None:  # the caller's own objects
            operation.outputs = list(outputs)
        return result(operation)

    return _submit(Operation(request, inputs, results), process_set, given)


def _submit_gather(
    prefix: str,
    tensors: list[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    result: Callable[[Operation], Any],
) -> int:
    _coordinator(process_set)
    inputs = [one.contiguous() for one in _checked(prefix, tensors)]
    request = _request(prefix, Kind.ALLGATHER, inputs, name, process_set)
    return _submit(Operation(request, inputs), process_set, result)


def _broadcast(
    tensor: torch.Tensor,
    output: torch.Tensor | None,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
) -> int:
    coordinator = _coordinator(process_set)
    if root_rank not in coordinator.members:
        raise ValueError(
            f"broadcast received invalid root rank {root_rank} for provided process set (ranks "
            f"{coordinator.members}). HINT: root_rank is the global rank of a member"
        )
    inputs = _checked("broadcast", [tensor])
    results = inputs if output is not None else [torch.empty_like(inputs[0])]
    root = int(root_rank)
    request = _request("broadcast", Kind.BROADCAST, inputs, name, process_set, root=root)
    return _submit(
        Operation(request, inputs, results),
        process_set,
        lambda operation: output if output is not None else _only(operation),
    )


def _reducescatter(
    prefix: str,
    tensors: list[torch.Tensor],
    name: str | None,
    op: Any,
    factors: tuple[float, float],
    process_set: ProcessSet,
    result: Callable[[Operation], Any],
) -> int:
    _coordinator(process_set)
    how = reduce_op(op, None)
    if how == Adasum:
        raise ValueError(
            f"{prefix}: Adasum is not possible. HINT: op=hvd.Average, hvd.Sum, hvd.Min, hvd.Max or "
            "hvd.Product"
        )
    inputs = [one.contiguous() for one in _checked(prefix, tensors, reduces=True)]
    scale = dict(zip(("prescale", "postscale"), map(float, factors), strict=True))
    request = _request(prefix, Kind.REDUCESCATTER, inputs, name, process_set, op=how, **scale)
    return _submit(Operation(request, inputs), process_set, result)


def _rows_for_ranks(tensor: torch.Tensor, splits: Any, size: int) -> list[int]:
    """Return the rows of the tensor that each rank receives."""
    if not tensor.dim():
        raise ValueError("alltoall: the tensor has no dimensions. HINT: tensor.reshape(1)")
    if splits is None:
        if tensor.shape[0] % size:
            raise ValueError(
                "alltoall: splits not provided, but first dimension of tensor is not an even "
                f"multiple of the number of workers: {tensor.shape[0]} rows for {size} ranks. "
                "HINT: pass splits="
            )
        return [tensor.shape[0] // size] * size
    if isinstance(splits, torch.Tensor):
        if splits.dtype != torch.int32:
            raise ValueError(
                "alltoall expects a 32-bit integer splits tensor; this is "
                f"{splits.dtype}. HINT: splits.int()"
            )
        splits = splits.reshape(-1).tolist()
    rows = [int(one) for one in splits]
    if len(rows) != size:
        raise ValueError(
            "alltoall: Number of entries in splits does not equal number of workers: "
            f"{len(rows)} entries for {size} ranks. HINT: one entry for each rank"
        )
    if min(rows) < 0 or sum(rows) > tensor.shape[0]:
        raise ValueError(
            "alltoall: Sum of splits entries is greater than the first dimension of tensor, or an "
            f"entry is negative: splits {rows} of {tensor.shape[0]} rows. HINT: the rows for each "
            "rank, in rank order"
        )
    return rows
