"""Compute the figures of each process group separately: data, tensor and pipeline groups differ."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...cost.collectives import bus_factor
from ...record.ring.states import POINT_TO_POINT_OPS
from ..records.match_collectives import UNKNOWN_GROUP, split_by_record
from ..records.read_record import axes_of_groups, mesh_places
from ..records.state_timeline import Ints, Timeline, Window, merge_intervals, total
from .losses import collective_name
from .measured_window import MeasuredWindow
from .pop import unblocked_ns

Rows = Ints | slice  # indices of rows


@dataclass(frozen=True)
class Collective:
    """One kind of collective in one group; wait, transfer and hidden as in Group.

    Attributes:
        count: Calls in the window; 0 for one that began before it, or whose launch is not known.
        bytes: Sum over all calls, of the whole vector each.
        algbw: Median of bytes / (last end - last start) in GB/s, over calls of at least 64 KiB.
        busbw: algbw x the bus factor of nccl-tests, in GB/s.
    """

    name: str
    count: int
    bytes: int
    wait: float
    transfer: float
    hidden: float
    algbw: float | None
    busbw: float | None


@dataclass(frozen=True)
class Group:
    """Figures of one process group. Shares refer to the time of its members.

    Attributes:
        size: Number of members; of those that are known, for an unknown group.
        wait, transfer: Blocked in communication of the group; wait contains its bubble.
        hidden: Communication of the group in flight while the rank was not blocked (overlap).
        load_balance: mean(b) / max(b) over the members.
        axis: The axes of the mesh along which its ranks differ: "tensor"; "" where that is unknown.
    """

    name: str
    size: int
    ranks: list[int]
    wait: float
    transfer: float
    hidden: float
    load_balance: float
    collectives: list[Collective]
    axis: str = ""


def group_figures(m: MeasuredWindow) -> list[Group]:
    """Return the figures of each group that communicated in the window, of one rank's groups too.

    Weighted with their members, the groups' waits and transfers add up to those of all ranks. GPU
    kernels whose collective is not known are a group of their own.
    """
    result = []
    axes = axes_of_groups(m.records)
    members_of: dict[str, dict[int, int]] = {name: {} for name in m.matched.groups}
    for i, record in enumerate(m.records):
        for group in record.meta.get("groups", {}).values():
            members_of[group["name"]][i] = int(group["size"])
    count = len(m.matched.groups)
    each = zip(
        m.matched.groups,
        _split_by_group(m.matched.launches, count),
        _split_by_group(m.matched.waits, count),
        strict=True,
    )
    for name, launch_rows, wait_rows in each:
        part = _GroupRows(m, m.matched.launches[launch_rows], m.matched.waits[wait_rows], wait_rows)
        if not part.inside.any() and not part.blocked.any():
            continue
        members = members_of[name] or dict.fromkeys(np.unique(part.waits["record"]).tolist(), 0)
        size = max(*members.values(), len(members))
        times = [unblocked_ns(m.states[i]) for i in members]
        whole = part.shares(len(members))
        result.append(
            Group(
                name,
                size,
                [m.records[i].rank for i in members],
                *whole,
                sum(times) / len(times) / max(times) if max(times) else 1.0,
                _collective_figures(part, size, len(members), whole),
                axes.get(name, ""),
            )
        )
    return result


class _GroupRows:
    """Rows of some of the window's communication: of a group, or of one kind in it.

    Attributes:
        inside: Which launches lie completely in the window.
        blocked: Exposed time of each wait (ns).
    """

    def __init__(
        self, m: MeasuredWindow, launches: np.ndarray, waits: np.ndarray, wait_rows: Rows
    ) -> None:
        self.m, self.launches, self.waits = m, launches, waits
        within = m.within
        self.inside = (launches["start"] >= within.start) & (launches["end"] <= within.end)
        self._wait = m.blocked.wait[wait_rows] + m.blocked.bubble[wait_rows]
        self._transfer = m.blocked.transfer[wait_rows]
        self.blocked = self._wait + self._transfer

    def shares(self, members: int, op: int | None = None) -> tuple[float, float, float]:
        """Return wait, transfer and hidden, of one kind or all, as shares of the members' time."""
        launches, waits, wait, transfer = self.launches, self.waits, self._wait, self._transfer
        if op is not None:
            of_op = waits["op"] == op
            launches = launches[launches["op"] == op]
            waits, wait, transfer = waits[of_op], wait[of_op], transfer[of_op]
        hidden = sum(overlapped_ns(launches, waits, self.m.timelines, self.m.within))
        whole = members * self.m.within.length
        return total(wait) / whole, total(transfer) / whole, hidden / whole

    def kinds(self) -> list[int]:
        """Return the kinds that were launched in the window, or blocked a rank in it."""
        found = [self.launches["op"][self.inside], self.waits["op"][self.blocked > 0]]
        return [int(op) for op in np.unique(np.concatenate(found))]


def _split_by_group(rows: np.ndarray, count: int) -> Iterator[Rows]:
    """Yield the indices of each group's rows, in the order of records; all if there is one group.

    A slice of all rows copies nothing.
    """
    if count <= 1:
        yield from [slice(None)] * count
        return
    order = np.argsort(rows["group"], kind="stable")
    ends = np.cumsum(np.bincount(rows["group"], minlength=count))
    yield from np.split(order, ends[:-1])


def overlapped_ns(
    launches: np.ndarray, waits: np.ndarray, timelines: list[Timeline], within: Window
) -> list[int]:
    """Return for how long each rank had communication in flight without being blocked (ns)."""
    result, count = [], len(timelines)
    both = zip(
        split_by_record(launches, count), split_by_record(waits, count), timelines, strict=True
    )
    for flight, blocked, line in both:
        if not len(flight) and not len(blocked):
            result.append(0)
            continue
        flight = flight[~flight["background"]]  # not of the thread that trains
        start, end = (np.concatenate([flight[n], blocked[n]]) for n in ("start", "end"))
        start, end = merge_intervals(start, end, within)
        unblocked = line.cumulative_unblocked
        time = unblocked(end) - unblocked(start) if len(start) else start
        result.append(int(time.sum()))
    return result


def _collective_figures(
    part: _GroupRows, size: int, members: int, whole: tuple[float, float, float]
) -> list[Collective]:
    """Return the figures of each kind of collective. whole: The group's shares."""
    launches, kinds = part.launches, part.kinds()
    alone = len(np.unique(np.concatenate([launches["op"], part.waits["op"]]))) == 1
    result = []
    for op in kinds:
        name = collective_name(op)
        share = whole if alone else part.shares(members, op)
        mine = part.inside & (launches["op"] == op)
        amount = launches["amount"][mine]
        if op in POINT_TO_POINT_OPS or not mine.any():
            result.append(Collective(name, len(amount), total(amount), *share, None, None))
            continue
        at = launches["node"][mine]
        at -= at.min()  # a group's nodes have numbers in a row
        count = int(np.count_nonzero(np.bincount(at)))
        last = np.full(int(at.max()) + 1, np.iinfo(np.int64).min)
        end = last.copy()
        amount_of = np.zeros(len(last), np.int64)
        np.maximum.at(last, at, launches["start"][mine])
        np.maximum.at(end, at, launches["end"][mine])
        np.maximum.at(amount_of, at, amount)
        large = (amount_of >= 1 << 16) & (end > last)
        speed = amount_of[large] / (end[large] - last[large])  # bytes/ns = GB/s
        algbw = float(np.median(speed)) if large.any() else None
        factor = bus_factor(name, size) if size > 1 else None
        busbw = algbw * factor if algbw is not None and factor is not None else None
        result.append(Collective(name, count, total(amount_of), *share, algbw, busbw))
    return result


def groups_add_up(groups: list[Group], states: list[dict[str, float]]) -> bool:
    """Return whether the groups add up to the ranks' blocked time, and collectives to groups."""
    for kind in ("wait", "transfer"):
        blocked = sum(rank[kind] + (rank["bubble"] if kind == "wait" else 0) for rank in states)
        found = sum(getattr(group, kind) * len(group.ranks) for group in groups)
        if abs(found - blocked) >= 1e-6 * max(len(states), 1):
            return False
        for group in groups:
            parts = sum(getattr(collective, kind) for collective in group.collectives)
            if abs(parts - getattr(group, kind)) >= 1e-6:
                return False
    return True


# Compute the figures of each axis of a mesh: the process groups along it, taken together.

ALL_RANKS = "all ranks"
OTHER_GROUPS = "other groups"


@dataclass(frozen=True)
class MeshAxis:
    """Figures of one axis. Shares refer to the time of all ranks, so that those of all axes add up.

    Attributes:
        name: The axis, or several ("data x tensor"); groups of all ranks and groups that no axis
            explains are rows of their own.
        extent: Number of ranks of each group; of the largest one, for other groups.
        groups: Number of process groups.
        wait, transfer: Time blocked in collectives of its groups; wait contains the bubble.
        hidden: Communication in flight while the rank was not blocked (overlap).
        load_balance: sum of b over the members / sum of the largest b of each member's group.
        wait_efficiency: 1 - wait.
        transfer_efficiency: (1 - wait - transfer) / (1 - wait).
        efficiency: wait_efficiency x transfer_efficiency, the share of the time that is left.
        bytes_per_step: Of the whole vectors of all calls, mean over the groups; None without steps.
    """

    name: str
    extent: int
    groups: int
    wait: float
    transfer: float
    hidden: float
    load_balance: float
    wait_efficiency: float
    transfer_efficiency: float
    efficiency: float
    bytes_per_step: float | None


def axis_figures(m: MeasuredWindow, groups: list[Group]) -> list[MeshAxis]:
    """Return the figures of each axis whose groups communicated; [] where "data" is the only one.

    The waits and transfers of all axes add up to those of all ranks.
    """
    if not mesh_places(m.records):
        return []
    count = len(m.records)
    of_axis: dict[str, list[Group]] = {}
    for group in groups:
        is_whole = len(group.ranks) == count > 1 and group.name != UNKNOWN_GROUP
        default = ALL_RANKS if is_whole else OTHER_GROUPS
        of_axis.setdefault(group.axis or default, []).append(group)
    found = [_axis(name, own, m) for name, own in of_axis.items()]
    return sorted(found, key=lambda one: -(one.wait + one.transfer))


def _axis(name: str, groups: list[Group], m: MeasuredWindow) -> MeshAxis:
    count = len(m.records)
    wait, transfer, hidden = (
        sum(getattr(group, what) * len(group.ranks) for group in groups) / count
        for what in ("wait", "transfer", "hidden")
    )
    busy = {r.rank: unblocked_ns(own) for r, own in zip(m.records, m.states, strict=True)}
    times = [[busy[rank] for rank in group.ranks] for group in groups]
    most = sum(max(own) * len(own) for own in times)
    steps = len(m.steps) if m.steps is not None else 0
    sent = sum(one.bytes for group in groups for one in group.collectives)
    free = 1 - wait
    return MeshAxis(
        name=name,
        extent=max(group.size for group in groups),
        groups=len(groups),
        wait=wait,
        transfer=transfer,
        hidden=hidden,
        load_balance=sum(map(sum, times)) / most if most else 1.0,
        wait_efficiency=free,
        transfer_efficiency=(free - transfer) / free if free > 0 else 1.0,
        efficiency=free - transfer,
        bytes_per_step=sent / len(groups) / steps if steps else None,
    )


def axes_add_up(axes: list[MeshAxis], states: list[dict[str, float]]) -> bool:
    """Return whether the axes add up to the blocked time of the ranks."""
    lost = {
        "wait": sum(rank["wait"] + rank["bubble"] for rank in states),
        "transfer": sum(rank["transfer"] for rank in states),
    }
    return not axes or all(
        abs(sum(getattr(axis, kind) for axis in axes) - ns / len(states)) < 1e-6
        for kind, ns in lost.items()
    )
