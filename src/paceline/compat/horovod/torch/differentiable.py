"""Synchronous operations of ``horovod.torch.mpi_ops``; those with results have gradients.

The gradient of a result with respect to each rank's tensor follows Horovod's convention: ranks
average their losses, except in an all-reduce with Sum.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..core.process_sets import ProcessSet, global_process_set
from .async_ops import (
    allgather_async,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    reduce_op,
    synchronize,
)
from .basics import Average, Sum, rank
from .compression import Compression


class HorovodGroupedAllreduce(torch.autograd.Function):
    """All-reduce of tensors; the gradients are all-reduced in the same way."""

    @staticmethod
    def forward(ctx: Any, name: Any, op: Any, factors: Any, process_set: Any, *tensors: Any) -> Any:
        ctx.arguments = (op, *factors, process_set)
        handle = grouped_allreduce_async(list(tensors), None, name, *ctx.arguments)
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        own = [one.contiguous() for one in gradients]
        reduced = synchronize(grouped_allreduce_async(own, None, None, *ctx.arguments))
        return (None, None, None, None, *reduced)


class HorovodAllreduce(torch.autograd.Function):
    """All-reduce of a tensor; its gradient is all-reduced in the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, name: Any, op: Any, factors: Any, process_set: Any) -> Any:
        ctx.arguments = (op, *factors, process_set)
        return synchronize(allreduce_async(tensor, None, name, *ctx.arguments))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        handle = allreduce_async(gradient.contiguous(), None, None, *ctx.arguments)
        return synchronize(handle), None, None, None, None


class HorovodGroupedAllgather(torch.autograd.Function):
    """Concatenation of tensors; a rank's gradient is its part of the ranks' average."""

    @staticmethod
    def forward(ctx: Any, name: Any, process_set: Any, *tensors: Any) -> Any:
        ctx.process_set = process_set
        ctx.rows = [len(one) for one in tensors]
        return tuple(synchronize(grouped_allgather_async(list(tensors), name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        own = [one.contiguous() for one in gradients]
        reduced = synchronize(grouped_allreduce_async(own, op=Average, process_set=ctx.process_set))
        counts = allgather(torch.tensor([ctx.rows]), process_set=ctx.process_set)
        starts = counts[: ctx.process_set.rank()].sum(0).tolist()
        parts = [
            one.narrow(0, start, rows)
            for one, start, rows in zip(reduced, starts, ctx.rows, strict=True)
        ]
        return (None, None, *parts)


class HorovodBroadcast(torch.autograd.Function):
    """Broadcast; the root's gradient is the ranks' average, and zero on other ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, root_rank: Any, name: Any, process_set: Any) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        handle = allreduce_async(gradient.contiguous(), op=Average, process_set=ctx.process_set)
        reduced = synchronize(handle)
        if rank() != ctx.root_rank:
            reduced.zero_()
        return reduced, None, None, None


class HorovodAlltoall(torch.autograd.Function):
    """Exchange of rows; the gradients of the rows go back to where the rows came from."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, splits: Any, name: Any, process_set: Any) -> Any:
        received, received_splits = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.process_set, ctx.received_splits, ctx.rows = process_set, received_splits, len(tensor)
        if splits is None:
            return received
        ctx.mark_non_differentiable(received_splits)
        return received, received_splits

    @staticmethod
    def backward(ctx: Any, gradient: Any, *unused: Any) -> Any:
        handle = alltoall_async(
            gradient.contiguous(), ctx.received_splits, process_set=ctx.process_set
        )
        sent, _ = synchronize(handle)
        if len(sent) < ctx.rows:  # rows that were sent to no rank
            rest = sent.new_zeros((ctx.rows - len(sent), *sent.shape[1:]))
            sent = torch.cat([sent, rest])
        return sent, None, None, None


class HorovodGroupedReducescatter(torch.autograd.Function):
    """Reduce-scatter of tensors; their gradients are concatenated, and times the ranks for Sum."""

    @staticmethod
    def forward(ctx: Any, name: Any, op: Any, factors: Any, process_set: Any, *tensors: Any) -> Any:
        ctx.process_set, ctx.factor = process_set, factors[0] * factors[1]
        if reduce_op(op, None) == Sum:
            ctx.factor *= process_set.size()
        handle = grouped_reducescatter_async(list(tensors), name, op, process_set, *factors)
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        own = [(one * ctx.factor).contiguous() for one in gradients]
        gathered = synchronize(grouped_allgather_async(own, process_set=ctx.process_set))
        return (None, None, None, None, *gathered)


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensor reduced over all ranks, by default their average.

    Args:
        average: Deprecated: use ``op``.
        name: Name that is the same on all ranks.
        compression: hvd.Compression.none or hvd.Compression.fp16.
        op: hvd.Average, Sum, Min, Max, Product or Adasum.
        prescale_factor, postscale_factor: Factors before and after the reduction.

    Raises:
        ValueError: The tensor can't be reduced, or this rank is not in the process set.
        HorovodInternalError: Ranks disagree about the operation, or a rank has ended.
    """
    compressed, ctx = compression.compress(tensor)
    factors = (prescale_factor, postscale_factor)
    how = reduce_op(op, average)
    reduced = _apply(HorovodAllreduce, compressed, name, how, factors, process_set)
    return compression.decompress(reduced, ctx)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over all ranks in place, and return it."""
    handle = allreduce_async_(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set
    )
    return synchronize(handle)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return tensors reduced over all ranks, which are exchanged together."""
    pairs = [compression.compress(one) for one in tensors]
    factors = (prescale_factor, postscale_factor)
    how = reduce_op(op, average)
    reduced = _apply(
        HorovodGroupedAllreduce, name, how, factors, process_set, *[one for one, _ in pairs]
    )
    return [compression.decompress(one, ctx) for one, (_, ctx) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce tensors over all ranks in place, together, and return them."""
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    return synchronize(handle)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the ranks' tensors concatenated; they may differ in the first dimension."""
    if not tensor.requires_grad:
        return synchronize(allgather_async(tensor, name, process_set))
    if not tensor.dim():  # an error on all ranks
        return synchronize(allgather_async(tensor, name, process_set))
    (gathered,) = _apply(HorovodGroupedAllgather, name, process_set, tensor)
    return gathered


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return each tensor concatenated over all ranks; they are exchanged together."""
    return list(_apply(HorovodGroupedAllgather, name, process_set, *tensors))


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensor of the global rank ``root_rank``."""
    return _apply(HorovodBroadcast, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Replace the tensor by that of the global rank ``root_rank``, and return it."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of the tensor to each rank, and return the received rows in rank order.

    With ``splits`` (rows for each rank) also return how many rows came from each rank.
    """
    return _apply(HorovodAlltoall, tensor, splits, name, process_set)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's part (of the first dimension) of the tensor reduced over all ranks."""
    (part,) = grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )
    return part


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this rank's part of each tensor reduced over all ranks, exchanged together."""
    pairs = [compression.compress(one) for one in tensors]
    factors = (prescale_factor, postscale_factor)
    parts = _apply(
        HorovodGroupedReducescatter, name, op, factors, process_set, *[one for one, _ in pairs]
    )
    return [compression.decompress(one, ctx) for one, (_, ctx) in zip(parts, pairs, strict=True)]
