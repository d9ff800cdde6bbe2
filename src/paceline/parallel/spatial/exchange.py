"""Rows that travel between the ranks of one axis, and sums over ranks, with their gradients.

One rule holds for all gradients: the gradient of a value that is divided is that of the rank's part
times the number of ranks that share the sample; gradients of values that all ranks hold add up to
it. So the mean of parameters' gradients over all ranks is the gradient of the whole sample.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ...comm.group_device import exchangeable
from .partition import Partition, Rows, Window

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
    local: torch.Tensor,
    dim: int,
    have: Partition,
    windows: Sequence[Window],
    line: Line,
    fill: float = 0.0,
) -> torch.Tensor:
    """Return the rows that this rank's window reads of a divided tensor, with its padding.

    Args:
        local: This rank's rows.
        dim: The divided dim.
        have: Which rows each rank holds.
        windows: Of each rank; rows of several ranks may overlap. ``order`` is not applied.
        fill: Value of the padding.
    """
    mine, part = windows[line.place], have.part(line.place)
    is_own = mine.needed == (part,) or (not mine.needed and part[0] == part[1])
    if is_own and not mine.before and not mine.after and _is_local(windows, have):
        return local
    if len(mine.needed) == 1 and not mine.before and not mine.after and _is_local(windows, have):
        (a, b), start = mine.needed[0], part[0]
        return local.narrow(dim, a - start, b - a)  # a view, which can be changed in place
    moved: torch.Tensor = _Fetch.apply(local, dim, have, tuple(windows), line, fill)  # type: ignore[no-untyped-call]
    return moved


def rows_of(parts: Sequence[Rows]) -> list[Window]:
    """Return windows that read some rows of each rank, without padding."""
    return [Window(((a, b),) if a < b else (), 0, 0) for a, b in parts]


def _is_local(windows: Sequence[Window], have: Partition) -> bool:
    """Return whether no rank reads rows of another one. The same on all ranks."""
    parts = have.parts()
    return all(
        part[0] <= a and b <= part[1]
        for one, part in zip(windows, parts, strict=True)
        for a, b in one.needed
    )


def _overlaps(want: Segments, part: Rows) -> list[Rows]:
    """Return the wanted rows that a rank holds."""
    cut = ((max(a, part[0]), min(b, part[1])) for a, b in want)
    return [(a, b) for a, b in cut if a < b]


def _pieces(window: Window, have: Partition) -> Iterator[tuple[int, Rows, int]]:
    """Yield the rank, the rows and the place in the window of each piece, in its order."""
    at = window.before
    for want in window.needed:
        for peer in range(have.ranks):
            for a, b in _overlaps((want,), have.part(peer)):
                yield peer, (a, b), at
                at += b - a


class _Fetch(torch.autograd.Function):
    """Rows of other ranks; their gradients go back, and are added there in the order of ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        dim: int,
        have: Partition,
        windows: tuple[Window, ...],
        line: Line,
        fill: float,
    ) -> torch.Tensor:
        ctx.dim, ctx.have, ctx.windows, ctx.line, ctx.shape = dim, have, windows, line, local.shape
        me, start, mine = line.place, have.bounds[line.place], windows[line.place]
        outgoing, incoming = {}, {}
        for peer in range(have.ranks):
            given = _overlaps(windows[peer].needed, have.part(me)) if peer != me else []
            if given:
                rows = [local.narrow(dim, a - start, b - a) for a, b in given]
                outgoing[peer] = _joined(rows, dim)
            taken = _overlaps(mine.needed, have.part(peer)) if peer != me else []
            if taken:
                incoming[peer] = _empty(local, dim, sum(b - a for a, b in taken))
        received = exchange(outgoing, incoming, line)
        length = sum(b - a for a, b in mine.needed)
        out = _empty(local, dim, mine.before + length + mine.after)
        out.narrow(dim, 0, mine.before).fill_(fill)
        out.narrow(dim, mine.before + length, mine.after).fill_(fill)
        used = dict.fromkeys(incoming, 0)
        for peer, (a, b), at in _pieces(mine, have):
            if peer == me:
                rows_of_piece = local.narrow(dim, a - start, b - a)
            else:
                rows_of_piece = received[peer].narrow(dim, used[peer], b - a)
                used[peer] += b - a
            out.narrow(dim, at, b - a).copy_(rows_of_piece)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        dim, have, windows, line = ctx.dim, ctx.have, ctx.windows, ctx.line
        me, start = line.place, have.bounds[line.place]
        total = gradient.new_zeros(ctx.shape)
        pieces: dict[int, list[torch.Tensor]] = {}
        for peer, (a, b), at in _pieces(windows[me], have):
            piece = gradient.narrow(dim, at, b - a)
            if peer == me:
                total.narrow(dim, a - start, b - a).add_(piece)
            else:
                pieces.setdefault(peer, []).append(piece)
        incoming, given = {}, {}
        for peer in range(have.ranks):
            given[peer] = _overlaps(windows[peer].needed, have.part(me)) if peer != me else []
            if given[peer]:
                incoming[peer] = _empty(gradient, dim, sum(b - a for a, b in given[peer]))
        outgoing = {peer: _joined(parts, dim) for peer, parts in pieces.items()}
        received = exchange(outgoing, incoming, line)
        for peer in sorted(received):
            at = 0
            for a, b in given[peer]:
                total.narrow(dim, a - start, b - a).add_(received[peer].narrow(dim, at, b - a))
                at += b - a
        return total, None, None, None, None, None


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
        return summed(local, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return summed(gradient, ctx.group), None


def summed(local: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum of a tensor over the ranks of a group, without a gradient."""
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
        return summed(tensor, self.group)
