"""Synchronous operations of ``horovod.torch.mpi_ops``; those with results have gradients.

The gradient of a result with respect to each rank's tensor follows Horovod's convention: ranks
average their losses, except in an all-reduce with Sum.
"""

import functools
from collections.abc import Callable, Sequence
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
    reducescatter_async,
)
from .basics import Average, Sum, rank
from .compression import Compression
from .submission import reduce_op, run

Start = Callable[..., int]  # starts the operation on tensors, and returns its handle


class HorovodAllreduce(torch.autograd.Function):
    """All-reduce of tensors; the gradients are all-reduced in the same way."""

    @staticmethod
    def forward(ctx: Any, start: Start, op: Any, factors: Any, process_set: Any, *own: Any) -> Any:
        ctx.arguments = (op, *factors, process_set)
        return _results(lambda: start(*own))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        own = [gradient.contiguous() for gradient in gradients]
        reduced = run(lambda: grouped_allreduce_async(own, None, None, *ctx.arguments))
        return (None, None, None, None, *reduced)


class HorovodAllgather(torch.autograd.Function):
    """Concatenation of tensors; a rank's gradient is its part of the ranks' average."""

    @staticmethod
    def forward(ctx: Any, start: Start, process_set: Any, *own: Any) -> Any:
        results = _results(lambda: start(*own))
        ctx.process_set = process_set
        ctx.rows = [len(one) for one in own]
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        own = [gradient.contiguous() for gradient in gradients]
        reduced = run(lambda: grouped_allreduce_async(own, op=Average, process_set=ctx.process_set))
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
        return run(lambda: broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        own = gradient.contiguous()
        reduced = run(lambda: allreduce_async(own, op=Average, process_set=ctx.process_set))
        if rank() != ctx.root_rank:
            reduced.zero_()
        return reduced, None, None, None


class HorovodAlltoall(torch.autograd.Function):
    """Exchange of rows; the gradients of the rows go back to where the rows came from."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, splits: Any, name: Any, process_set: Any) -> Any:
        received, received_splits = run(lambda: alltoall_async(tensor, splits, name, process_set))
        ctx.process_set, ctx.received_splits, ctx.rows = process_set, received_splits, len(tensor)
        if splits is None:
            return received
        ctx.mark_non_differentiable(received_splits)
        return received, received_splits

    @staticmethod
    def backward(ctx: Any, gradient: Any, *unused: Any) -> Any:
        own, splits = gradient.contiguous(), ctx.received_splits
        sent, _ = run(lambda: alltoall_async(own, splits, process_set=ctx.process_set))
        if len(sent) < ctx.rows:  # rows that were sent to no rank
            rest = sent.new_zeros((ctx.rows - len(sent), *sent.shape[1:]))
            sent = torch.cat([sent, rest])
        return sent, None, None, None


class HorovodReducescatter(torch.autograd.Function):
    """Reduce-scatter of tensors; their gradients are concatenated, and times the ranks for Sum."""

    @staticmethod
    def forward(ctx: Any, start: Start, op: Any, factors: Any, process_set: Any, *own: Any) -> Any:
        ctx.process_set, ctx.factor = process_set, factors[0] * factors[1]
        if reduce_op(op, None) == Sum:
            ctx.factor *= process_set.size()
        return _results(lambda: start(*own))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        own = [(gradient * ctx.factor).contiguous() for gradient in gradients]
        gathered = run(lambda: grouped_allgather_async(own, process_set=ctx.process_set))
        return (None, None, None, None, *gathered)


def _results(start: Callable[[], int]) -> Any:
    """Return the results of an operation, as a tuple."""
    found = run(start)
    return (found,) if isinstance(found, torch.Tensor) else tuple(found)


def _run(
    function: Any, start: Start, arguments: tuple[Any, ...], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Run an operation; through autograd if a tensor needs a gradient."""
    if torch.is_grad_enabled() and any(
        getattr(tensor, "requires_grad", False) for tensor in tensors
    ):
        return list(function.apply(start, *arguments, *tensors))
    return list(_results(lambda: start(*tensors)))


def _run_compressed(
    function: Any,
    start: Start,
    arguments: tuple[Any, ...],
    tensors: Sequence[torch.Tensor],
    compression: Any,
) -> list[torch.Tensor]:
    """Run an operation on compressed tensors, and return its results as they were before."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = _run(function, start, arguments, [one for one, _ in pairs])
    return list(map(compression.decompress, results, [context for _, context in pairs]))


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
    how, factors = reduce_op(op, average), (prescale_factor, postscale_factor)

    def start(own: torch.Tensor) -> int:
        return allreduce_async(own, None, name, how, *factors, process_set)

    arguments = (how, factors, process_set)
    return _run_compressed(HorovodAllreduce, start, arguments, [tensor], compression)[0]


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
    how, factors = reduce_op(op, average), (prescale_factor, postscale_factor)

    def start(*own: torch.Tensor) -> int:
        return grouped_allreduce_async(own, None, name, how, *factors, process_set)

    arguments = (how, factors, process_set)
    return _run_compressed(HorovodAllreduce, start, arguments, tensors, compression)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the ranks' tensors concatenated; they may differ in the first dimension."""

    def start(own: torch.Tensor) -> int:
        return allgather_async(own, name, process_set)

    return _run(HorovodAllgather, start, (process_set,), [tensor])[0]


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return each tensor concatenated over all ranks; they are exchanged together."""

    def start(*own: torch.Tensor) -> int:
        return grouped_allgather_async(own, name, process_set)

    return _run(HorovodAllgather, start, (process_set,), tensors)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensor of the global rank ``root_rank``."""
    function: Any = HorovodBroadcast
    received: torch.Tensor = function.apply(tensor, root_rank, name, process_set)
    return received


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of the tensor to each rank, and return the received rows in rank order.

    With ``splits`` (rows for each rank) also return how many rows came from each rank.
    """
    function: Any = HorovodAlltoall
    return function.apply(tensor, splits, name, process_set)


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
    factors = (prescale_factor, postscale_factor)

    def start(own: torch.Tensor) -> int:
        return reducescatter_async(own, name, op, process_set, *factors)

    arguments = (op, factors, process_set)
    return _run_compressed(HorovodReducescatter, start, arguments, [tensor], compression)[0]


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
    factors = (prescale_factor, postscale_factor)

    def start(*own: torch.Tensor) -> int:
        return grouped_reducescatter_async(own, name, op, process_set, *factors)

    arguments = (op, factors, process_set)
    return _run_compressed(HorovodReducescatter, start, arguments, tensors, compression)


def _waiting(start: Start, name: str, doc: str) -> Callable[..., Any]:
    """Return a function that starts an operation, waits for it and returns its result."""

    @functools.wraps(start)
    def function(*args: Any, **options: Any) -> Any:
        return run(lambda: start(*args, **options))

    function.__name__, function.__doc__ = name, doc
    return function


allreduce_ = _waiting(
    allreduce_async_, "allreduce_", "Reduce a tensor over all ranks in place, and return it."
)
grouped_allreduce_ = _waiting(
    *(grouped_allreduce_async_, "grouped_allreduce_"),
    "Reduce tensors over all ranks in place, together, and return them.",
)
broadcast_ = _waiting(
    *(broadcast_async_, "broadcast_"),
    "Replace the tensor by that of the global rank ``root_rank``, and return it.",
)
