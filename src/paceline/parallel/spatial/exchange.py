"""Rows that travel between the ranks of one axis, and sums over ranks, with their gradients.

One rule holds for all gradients: the gradient of a value that is divided is that of the rank's part
times the number of ranks that share the sample; gradients of values that all ranks hold add up to
it. So the mean of parameters' gradients over all ranks is the gradient of the whole sample.
"""

import atexit
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ...comm.group_device import exchangeable
from ...record.ring.header_schema import MAX_BLOCK_CHARS, MAX_HALO_LAYERS
from ...record.ring.recorder import update_all_headers
from ..divided.module_names import layer
from .partition import Partition, Rows, Window

WRITE_INTERVAL_S = 1.0
FURTHER_LAYERS = "further layers"
MAX_NAMES_CHARS = 4096  # of all names together: the header has other fields


class HaloTotals:
    """Totals of this process since its first halo."""

    def __init__(self) -> None:
        self._layers: dict[str, list[float]] = {}  # exchanges, bytes, exposed ns
        self._start = self._last = self._written = 0.0

    @property
    def exposed_s(self) -> float:
        """Time in which this process waited for halos."""
        return sum(ns for _, _, ns in self._layers.values()) / 1e9

    def add(self, layer: str, received_bytes: int, exposed_ns: int) -> None:
        """Note one exchange of a layer, in forward or backward; write all now and then."""
        self._last = now = time.monotonic()
        if not self._start:
            self._start = now
            atexit.register(self.write)
        name = layer[:MAX_BLOCK_CHARS]
        if name not in self._layers:
            room = MAX_NAMES_CHARS - sum(map(len, self._layers))
            if len(self._layers) >= MAX_HALO_LAYERS - 1 or len(name) > room:
                name = FURTHER_LAYERS
        totals = self._layers.setdefault(name, [0, 0, 0])
        totals[0] += 1
        totals[1] += received_bytes
        totals[2] += exposed_ns
        if now - self._written >= WRITE_INTERVAL_S:
            self.write()

    def write(self) -> None:
        """Write the totals to the records of this process."""
        self._written = self._last
        layers = [
            [own, int(count), int(size), ns / 1e9]
            for own, (count, size, ns) in self._layers.items()
        ]
        update_all_headers(halos={"seconds": self._last - self._start, "layers": layers})


halo_totals = HaloTotals()


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


@dataclass(frozen=True)
class Fetch:
    """How the rows travel that the ranks' windows read of a divided tensor.

    Attributes:
        dim: The divided dim.
        have: Which rows each rank holds.
        windows: Of each rank; rows of several ranks may overlap. ``order`` is not applied.
        line: The ranks.
        borders: Zeros around ``assemble``'s result along other dims: dim, rows before and after.
        name: The layer that reads them.
    """

    dim: int
    have: Partition
    windows: tuple[Window, ...]
    line: Line
    borders: tuple[tuple[int, int, int], ...] = ()
    name: str = field(default_factory=layer)

    @property
    def is_local(self) -> bool:
        """Whether no rank reads rows of another one. The same on all ranks."""
        parts = self.have.parts()
        return all(
            part[0] <= a and b <= part[1]
            for window_of_rank, part in zip(self.windows, parts, strict=True)
            for a, b in window_of_rank.needed
        )

    @property
    def own(self) -> Rows:
        """The rows of this rank."""
        return self.have.part(self.line.place)

    @property
    def length(self) -> int:
        """Number of rows of this rank's window, with its padding."""
        mine = self.windows[self.line.place]
        return mine.before + sum(b - a for a, b in mine.needed) + mine.after

    @property
    def own_range(self) -> Rows:
        """The rows of this rank's window that need no other rank: its own, with padding."""
        mine = self.windows[self.line.place]
        own = [
            (at, at + b - a)
            for peer, (a, b), at in _pieces(mine, self.have)
            if peer == self.line.place
        ]
        if not own:
            return 0, 0
        first, end = own[0][0], own[-1][1]
        return (
            0 if first == mine.before else first,
            self.length if end == self.length - mine.after else end,
        )

    def _given(self) -> dict[int, list[Rows]]:
        """Return which of this rank's rows each other rank reads."""
        return {
            peer: rows
            for peer, window in enumerate(self.windows)
            if peer != self.line.place and (rows := _overlaps(window.needed, self.own))
        }

    def _taken(self) -> dict[int, list[Rows]]:
        """Return which rows this rank reads of each other one."""
        needed = self.windows[self.line.place].needed
        return {
            peer: rows
            for peer, part in enumerate(self.have.parts())
            if peer != self.line.place and (rows := _overlaps(needed, part))
        }

    def start(self, local: torch.Tensor) -> "Transfer":
        """Send this rank's rows to the ranks that read them, and begin to receive."""
        first = self.own[0]
        outgoing = {
            peer: _joined([local.narrow(self.dim, a - first, b - a) for a, b in rows], self.dim)
            for peer, rows in self._given().items()
        }
        incoming = {peer: _empty(local, self.dim, _count(r)) for peer, r in self._taken().items()}
        return Transfer(outgoing, incoming, self.line, self.name)

    def assemble(
        self,
        local: torch.Tensor,
        received: Mapping[int, torch.Tensor],
        first: int = 0,
        end: int | None = None,
    ) -> torch.Tensor:
        """Return the rows of this rank's window, or those from ``first`` to before ``end``.

        They are a view where all are this rank's own, and without borders. Padding is zeros.

        Args:
            received: By place, from ``start``; without those of ranks that have none of these rows.
        """
        end = self.length if end is None else end
        mine, dim = self.windows[self.line.place], self.dim
        for peer, (a, b), at in _pieces(mine, self.have):
            is_own = peer == self.line.place and at <= first and end <= at + b - a
            if is_own and not self.borders:
                return local.narrow(dim, a - self.own[0] + first - at, end - first)
        shape = list(local.shape)
        shape[dim] = end - first
        for other, before, after in self.borders:
            shape[other] += before + after
        padded = local.new_zeros(shape) if self.borders else local.new_empty(shape)
        out = self._without_borders(padded)
        inner = self.length - mine.after
        for a, b in ((first, min(end, mine.before)), (max(first, inner), end)):
            if a < b:
                out.narrow(dim, a - first, b - a).zero_()
        used = dict.fromkeys(range(self.have.ranks), 0)
        for peer, (a, b), at in _pieces(mine, self.have):
            low, high = max(at, first), min(at + b - a, end)
            source, start = (
                (local, a - self.own[0])
                if peer == self.line.place
                else (received.get(peer), used[peer])
            )
            used[peer] += b - a
            if low < high:
                assert source is not None
                rows = source.narrow(dim, start + low - at, high - low)
                out.narrow(dim, low - first, high - low).copy_(rows)
        return padded

    def _without_borders(self, rows: torch.Tensor) -> torch.Tensor:
        for dim, before, after in self.borders:
            rows = rows.narrow(dim, before, rows.size(dim) - before - after)
        return rows

    def start_back(self, gradient: torch.Tensor) -> "Transfer":
        """Send the gradients of other ranks' rows to them, and begin to receive those of own rows.

        Args:
            gradient: Of what ``assemble`` has returned.
        """
        gradient = self._without_borders(gradient)
        pieces: dict[int, list[torch.Tensor]] = {}
        for peer, (a, b), at in _pieces(self.windows[self.line.place], self.have):
            if peer != self.line.place:
                pieces.setdefault(peer, []).append(gradient.narrow(self.dim, at, b - a))
        incoming = {
            peer: _empty(gradient, self.dim, _count(r)) for peer, r in self._given().items()
        }
        outgoing = {peer: _joined(parts, self.dim) for peer, parts in pieces.items()}
        return Transfer(outgoing, incoming, self.line, self.name)

    def add_back(
        self, gradient: torch.Tensor, received: Mapping[int, torch.Tensor]
    ) -> torch.Tensor:
        """Return the gradient of this rank's rows; those of other ranks are added in their order.

        Args:
            received: What ``start_back`` has begun to receive.
        """
        gradient, dim, start = self._without_borders(gradient), self.dim, self.own[0]
        own = [piece for piece in _pieces(self.windows[self.line.place], self.have)
               if piece[0] == self.line.place]  # fmt: skip
        if len(own) == 1 and own[0][1] == self.own:  # the usual case: all rows, once
            rows = gradient.narrow(dim, own[0][2], _count([self.own]))
            total = rows.clone(memory_format=torch.contiguous_format)
        else:
            total = _empty(gradient, dim, _count([self.own])).zero_()
            for _, (a, b), at in own:
                total.narrow(dim, a - start, b - a).add_(gradient.narrow(dim, at, b - a))
        given = self._given()
        for peer in sorted(received):
            at = 0
            for a, b in given[peer]:
                total.narrow(dim, a - start, b - a).add_(received[peer].narrow(dim, at, b - a))
                at += b - a
        return total


def fetch(
    local: torch.Tensor, dim: int, have: Partition, windows: Sequence[Window], line: Line
) -> torch.Tensor:
    """Return the rows that this rank's window reads of a divided tensor, with its padding.

    Args:
        local: This rank's rows.
        dim, have, windows, line: As for ``Fetch``.
    """
    plan = Fetch(dim, have, tuple(windows), line)
    mine, part = windows[line.place], plan.own
    is_own = mine.needed == (part,) or (not mine.needed and part[0] == part[1])
    is_plain = not mine.before and not mine.after and plan.is_local
    if is_own and is_plain:
        return local
    if len(mine.needed) == 1 and is_plain:
        (a, b), start = mine.needed[0], part[0]
        return local.narrow(dim, a - start, b - a)  # a view, which can be changed in place
    moved: torch.Tensor = _Fetch.apply(local, plan)  # type: ignore[no-untyped-call]
    return moved


def rows_of(parts: Sequence[Rows]) -> list[Window]:
    """Return windows that read some rows of each rank, without padding."""
    return [Window(((a, b),) if a < b else (), 0, 0) for a, b in parts]


def _overlaps(want: Sequence[Rows], part: Rows) -> list[Rows]:
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


def _count(rows: Sequence[Rows]) -> int:
    return sum(b - a for a, b in rows)


def first_gradient_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward that raises ValueError where its own gradient is asked for.

    ``ctx.layer`` is the layer that was computing in forward.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise ValueError(
                f"{ctx.layer}: gradients of gradients (create_graph=True) are not implemented for "
                "a tensor whose sample is divided over ranks. HINT: a layout without d, h and w"
            )
        return backward(ctx, *gradients)

    return checked


class _Fetch(torch.autograd.Function):
    """Rows of other ranks; their gradients go back, and are added there in the order of ranks."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, plan: Fetch) -> torch.Tensor:
        ctx.plan, ctx.layer = plan, plan.name
        rows = plan.assemble(local, plan.start(local).wait())
        is_view = rows.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        return rows.clone() if is_view else rows  # the model may change it in place

    @staticmethod
    @first_gradient_only
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        received = ctx.plan.start_back(gradient).wait()
        return ctx.plan.add_back(gradient, received), None


class Transfer:
    """Tensors that travel between the ranks of a line.

    Args:
        outgoing: By place of the receiver.
        incoming: By place of the sender, tensors of the shapes that come.
        layer: Which layer reads them.
    """

    def __init__(
        self,
        outgoing: dict[int, torch.Tensor],
        incoming: dict[int, torch.Tensor],
        line: Line,
        layer: str,
    ) -> None:
        self._layer = layer
        self._devices = {peer: tensor.device for peer, tensor in incoming.items()}
        self._received = {peer: exchangeable(tensor) for peer, tensor in incoming.items()}
        self._sent = {peer: exchangeable(_resolved(tensor)) for peer, tensor in outgoing.items()}
        operations = [
            dist.P2POp(dist.irecv, _bytes(tensor), line.ranks[peer], line.group)
            for peer, tensor in self._received.items()
        ]
        operations += [
            dist.P2POp(dist.isend, _bytes(tensor), line.ranks[peer], line.group)
            for peer, tensor in self._sent.items()
        ]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> dict[int, torch.Tensor]:
        """Return what has come, by place of the sender."""
        start = time.monotonic_ns()
        for work in self._works:
            work.wait()
        if self._works:
            received = sum(tensor.nbytes for tensor in self._received.values())
            halo_totals.add(self._layer, received, time.monotonic_ns() - start)
        return {peer: tensor.to(self._devices[peer]) for peer, tensor in self._received.items()}


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory has its values, and not those of its conjugate or negative."""
    return tensor.resolve_conj().resolve_neg()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a type that every backend sends."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _joined(pieces: list[torch.Tensor], dim: int) -> torch.Tensor:
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)).contiguous()


def _empty(like: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    shape = list(like.shape)
    shape[dim] = rows
    return like.new_empty(shape)


Division = tuple[int, Partition]  # a dim, and its partition


def redivide(local: torch.Tensor, have: Division, want: Division, line: Line) -> torch.Tensor:
    """Return this rank's part of a tensor that is divided along another dim. Collective.

    Each rank sends each other one a block, so that a rank receives about as much as it holds.

    Args:
        local: The part.
        have, want: How the tensor is divided, and how it will be.
    """
    moved: torch.Tensor = _Redivide.apply(local, have, want, line, layer())  # type: ignore[no-untyped-call]
    return moved


class _Redivide(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, have: Division, want: Division, line: Line, name: str
    ) -> torch.Tensor:
        ctx.given, ctx.layer = (want, have, line, name), name
        return _redivided(local, have, want, line, name)

    @staticmethod
    @first_gradient_only
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _redivided(gradient, *ctx.given), None, None, None, None


def _redivided(
    local: torch.Tensor, have: Division, want: Division, line: Line, name: str
) -> torch.Tensor:
    blocks, incoming = {}, {}
    (old, rows), (new, wanted) = have, want
    own = _count([wanted.part(line.place)])
    for peer in range(rows.ranks):
        a, b = wanted.part(peer)
        blocks[peer] = local.narrow(new, a, b - a)
        if peer != line.place:
            shape = list(local.shape)
            shape[old], shape[new] = _count([rows.part(peer)]), own
            incoming[peer] = local.new_empty(shape)
    kept = blocks.pop(line.place)
    outgoing = {peer: block.contiguous() for peer, block in blocks.items() if block.numel()}
    arriving = {peer: block for peer, block in incoming.items() if block.numel()}
    received = {line.place: kept} | incoming | Transfer(outgoing, arriving, line, name).wait()
    return torch.cat([received[peer] for peer in range(rows.ranks)], old)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.layer = group, layer()
        return summed(local, group)

    @staticmethod
    @first_gradient_only
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return summed(gradient, ctx.group), None


def summed(local: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum of a tensor over the ranks of a group, without a gradient."""
    total = exchangeable(_resolved(local).contiguous())
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
