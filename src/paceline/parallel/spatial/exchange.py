"""Rows that travel between the ranks of one axis, and sums over ranks, with their gradients.

One rule holds for all gradients: the gradient of a value that is divided is that of the rank's part
times the number of ranks that share the sample; gradients of values that all ranks hold add up to
it. So the mean of parameters' gradients over all ranks is the gradient of the whole sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ...comm.group_device import exchangeable
from .partition import Partition, Rows

Segments = tuple[Rows, ...]


@dataclass(frozen=True)
class Line:
    """The ranks along one axis.

    Attributes:
        group: Process group.
        ranks: Global ranks in their order along the axis.
        place: This rank's place in it.
    """

    group: Any
    ranks: tuple[int, ...]
    place: int


def fetch(
    local: torch.Tensor, dim: int, have: Partition, wanted: Sequence[Segments], line: Line
) -> torch.Tensor:
    """Return this rank's wanted rows of a divided tensor, joined in their order.

    Args:
        local: This rank's rows.
        dim: The divided dim.
        have: Which rows each rank holds.
        wanted: Of each rank, the rows that it asks for; rows of several ranks may overlap.
    """
    mine = wanted[line.place]
    if all(_inside(want, have.part(rank)) for rank, want in enumerate(wanted)):
        if mine == (have.part(line.place),):
            return local
        start = have.bounds[line.place]
        pieces = [local.narrow(dim, a - start, b - a) for a, b in mine]
        return (
            pieces[0] if len(pieces) == 1 else torch.cat(pieces or [local.narrow(dim, 0, 0)], dim)
        )
    moved: torch.Tensor = _Fetch.apply(local, dim, have, tuple(wanted), line)  # type: ignore[no-untyped-call]
    return moved


def _inside(want: Segments, part: Rows) -> bool:
    return all(part[0] <= a and b <= part[1] for a, b in want)


def _overlaps(want: Segments, part: Rows) -> list[Rows]:
    """Return the wanted rows that a rank holds."""
    cut = ((max(a, part[0]), min(b, part[1])) for a, b in want)
    return [(a, b) for a, b in cut if a < b]


class _Fetch(torch.autograd.Function):
    """Rows of other ranks; their gradients go back, and are added there in the order of ranks."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, dim: int, have: Partition, wanted: Any, line: Line
    ) -> torch.Tensor:
        ctx.dim, ctx.have, ctx.wanted, ctx.line, ctx.shape = dim, have, wanted, line, local.shape
        start, me = have.bounds[line.place], line.place
        outgoing, incoming = {}, {}
        for peer in range(have.ranks):
            if peer == me:
                continue
            given = _overlaps(wanted[peer], have.part(me))
            if given:
                outgoing[peer] = _joined(
                    [local.narrow(dim, a - start, b - a) for a, b in given], dim
                )
            taken = _overlaps(wanted[me], have.part(peer))
            if taken:
                incoming[peer] = _empty(local, dim, sum(b - a for a, b in taken))
        received = exchange(outgoing, incoming, line)
        pieces, used = [], dict.fromkeys(incoming, 0)
        for want in wanted[me]:
            for peer in range(have.ranks):
                for a, b in _overlaps((want,), have.part(peer)):
                    if peer == me:
                        pieces.append(local.narrow(dim, a - start, b - a))
                        continue
                    pieces.append(received[peer].narrow(dim, used[peer], b - a))
                    used[peer] += b - a
        return torch.cat(pieces, dim) if pieces else _empty(local, dim, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        dim, have, wanted, line = ctx.dim, ctx.have, ctx.wanted, ctx.line
        me, start = line.place, have.bounds[line.place]
        total = gradient.new_zeros(ctx.shape)
        pieces: dict[int, list[torch.Tensor]] = {}
        at = 0
        for want in wanted[me]:
            for peer in range(have.ranks):
                for a, b in _overlaps((want,), have.part(peer)):
                    piece = gradient.narrow(dim, at, b - a)
                    at += b - a
                    if peer == me:
                        total.narrow(dim, a - start, b - a).add_(piece)
                    else:
                        pieces.setdefault(peer, []).append(piece)
        incoming, given = {}, {}
        for peer in range(have.ranks):
            given[peer] = _overlaps(wanted[peer], have.part(me)) if peer != me else []
            if given[peer]:
                incoming[peer] = _empty(gradient, dim, sum(b - a for a, b in given[peer]))
        outgoing = {peer: _joined(parts, dim) for peer, parts in pieces.items()}
        received = exchange(outgoing, incoming, line)
        for peer in sorted(received):
            at = 0
            for a, b in given[peer]:
                rows = received[peer].narrow(dim, at, b - a)
                total.narrow(dim, a - start, b - a).add_(rows)
                at += b - a
        return total, None, None, None, None


def exchange(
    outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor], line: Line
) -> dict[int, torch.Tensor]:
    """Send tensors to ranks of a line by place, and return those that come from others."""
    received = {peer: exchangeable(tensor) for peer, tensor in incoming.items()}
    operations = [
        dist.P2POp(dist.irecv, _bytes(tensor), line.ranks[peer], line.group)
        for peer, tensor in received.items()
    ]
    sent = {peer: exchangeable(tensor) for peer, tensor in outgoing.items()}
    operations += [
        dist.P2POp(dist.isend, _bytes(tensor), line.ranks[peer], line.group)
        for peer, tensor in sent.items()
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return {peer: tensor.to(incoming[peer].device) for peer, tensor in received.items()}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a type that every backend sends."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _joined(pieces: list[torch.Tensor], dim: int) -> torch.Tensor:
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)).contiguous()


def _empty(like: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    shape = list(like.shape)
    shape[dim] = rows
    return like.new_empty(shape)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _summed(local, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _summed(gradient, ctx.group), None


def _summed(local: torch.Tensor, group: Any) -> torch.Tensor:
    total = exchangeable(local.contiguous())
    if total.data_ptr() == local.data_ptr():
        total = total.clone()
    dist.all_reduce(total, group=group)
    return total.to(local.device)


def sum_over(local: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum of a tensor over the ranks of a group, on all of them; None: no ranks."""
    if group is None:
        return local
    total: torch.Tensor = _SumOverRanks.apply(local, group)  # type: ignore[no-untyped-call]
    return total


class GroupExchange:
    """How batch normalization combines the statistics of the ranks that share samples."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, stacked: [ranks, *row.shape]."""
        sent = exchangeable(row.contiguous())
        rows = [torch.empty_like(sent) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(rows, sent, group=self.group)
        return torch.stack(rows).to(row.device)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of the tensors of all ranks."""
        return _summed(tensor, self.group)
