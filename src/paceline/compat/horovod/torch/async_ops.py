"""Asynchronous operations of ``horovod.torch.mpi_ops``: they return handles.

Unless a call says otherwise, ``name`` must be the same on all ranks and different from those of
other operations in progress, and shape and dtype of the tensor must be the same on all ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core import world
from ..core.process_sets import ProcessSet, global_process_set
from ..core.requests import Kind, Operation, ReduceOp
from .basics import Adasum, Average, Sum
from .submission import (
    checked,
    coordinator_of,
    new_request,
    outputs_of,
    reduce_op,
    run,
    submit,
    synchronize,
)


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
    how = reduce_op(op, average)
    return _allreduce([tensor], None, name, how, factors, process_set)


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
    how = reduce_op(op, average)
    return _allreduce([tensor], [tensor], name, how, factors, process_set)


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
    how = reduce_op(op, average)
    return _allreduce(list(tensors), None, name, how, factors, process_set, grouped=True)


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
    return _allreduce(inputs, inputs, name, how, factors, process_set, grouped=True)


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
    return _allgather([tensor], name, process_set)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Concatenate each of several tensors over all ranks."""
    return _allgather(list(tensors), name, process_set, grouped=True)


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
    coordinator = coordinator_of(process_set)
    inputs = checked("alltoall", [tensor])
    rows = _rows_for_ranks(tensor, splits, coordinator.size)
    device = splits.device if isinstance(splits, torch.Tensor) else "cpu"

    def result(operation: Operation) -> Any:
        assert operation.outputs is not None
        received = torch.tensor(operation.received_splits, dtype=torch.int32, device=device)
        return operation.outputs[0], received

    request = new_request("alltoall", Kind.ALLTOALL, inputs, name, process_set)
    return submit(coordinator, Operation(request, inputs, splits=rows), result)


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
    return _reducescatter([tensor], name, op, factors, process_set)


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
    return _reducescatter(list(tensors), name, op, factors, process_set, grouped=True)


def join(device: int = -1) -> int:
    """Contribute zeros to the other ranks' all-reduces until all ranks have called ``join``.

    Args:
        device: Not used: zeros are made on the device of the other ranks' tensors.

    Returns:
        The rank that joined last.
    """
    last = coordinator_of(global_process_set).join()
    world.current_world().forget_unnamed(0)
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have called it."""
    coordinator = coordinator_of(process_set)
    request = new_request("barrier", Kind.BARRIER, [], None, process_set)
    run(lambda: submit(coordinator, Operation(request), lambda _: None))


# Implementation.


def _allreduce(
    tensors: list[torch.Tensor],
    outputs: list[torch.Tensor] | None,
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    grouped: bool = False,
) -> int:
    """Submit an all-reduce. outputs: None for new tensors."""
    coordinator, prefix = coordinator_of(process_set), "grouped_" * grouped + "allreduce"
    if op is Adasum:
        world.check_adasum(process_set)
    inputs = checked(prefix, tensors, reduces=True)
    results = [torch.empty_like(tensor) for tensor in inputs] if outputs is None else inputs
    request = new_request(prefix, Kind.ALLREDUCE, inputs, name, process_set, op, factors)
    return submit(coordinator, Operation(request, inputs, results), outputs_of(grouped, outputs))


def _allgather(
    tensors: list[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    grouped: bool = False,
) -> int:
    coordinator, prefix = coordinator_of(process_set), "grouped_" * grouped + "allgather"
    inputs = [one.contiguous() for one in checked(prefix, tensors)]
    request = new_request(prefix, Kind.ALLGATHER, inputs, name, process_set)
    return submit(coordinator, Operation(request, inputs), outputs_of(grouped))


def _broadcast(
    tensor: torch.Tensor,
    output: torch.Tensor | None,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
) -> int:
    coordinator = coordinator_of(process_set)
    if root_rank not in coordinator.members:
        raise ValueError(
            f"broadcast received invalid root rank {root_rank} for provided process set (ranks "
            f"{coordinator.members}). HINT: root_rank is the global rank of a member"
        )
    inputs = checked("broadcast", [tensor])
    results = inputs if output is not None else [torch.empty_like(inputs[0])]
    request = new_request(
        "broadcast", Kind.BROADCAST, inputs, name, process_set, root=int(root_rank)
    )
    own = None if output is None else [output]
    return submit(coordinator, Operation(request, inputs, results), outputs_of(False, own))


def _reducescatter(
    tensors: list[torch.Tensor],
    name: str | None,
    op: Any,
    factors: tuple[float, float],
    process_set: ProcessSet,
    grouped: bool = False,
) -> int:
    coordinator, prefix = coordinator_of(process_set), "grouped_" * grouped + "reducescatter"
    how = reduce_op(op, None)
    if how is Adasum:
        raise ValueError(
            f"{prefix}: Adasum is not possible. HINT: op=hvd.Average, hvd.Sum, hvd.Min, hvd.Max or "
            "hvd.Product"
        )
    inputs = [one.contiguous() for one in checked(prefix, tensors, reduces=True)]
    request = new_request(prefix, Kind.REDUCESCATTER, inputs, name, process_set, how, factors)
    return submit(coordinator, Operation(request, inputs), outputs_of(grouped))


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
    rows = [int(split) for split in splits]
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
