"""Compute the figures of each process group separately: data, tensor and pipeline groups differ."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...record.ring.states import POINT_TO_POINT_OPS, Op
from ..records.match_collectives import MatchedCommunication, split_by_record
from ..records.read_record import Record
from ..records.state_timeline import Timeline, Window, merge_intervals, total
from .losses import collective_name
from .pop import busy_ns

# Bytes that cross a link, per byte of the whole vector, for p ranks (as in nccl-tests).
_BUS_FACTOR: dict[int, Callable[[int], float]] = {
    Op.ALL_REDUCE: lambda p: 2 * (p - 1) / p,
    Op.REDUCE_SCATTER: lambda p: (p - 1) / p,
    Op.ALL_GATHER: lambda p: (p - 1) / p,
    Op.ALL_TO_ALL: lambda p: (p - 1) / p,
}


@dataclass(frozen=True)
class Collective:
    """One kind of collective in one group; wait, transfer and hidden as in Group.

    Attributes:
        bytes: Sum over all calls, of the whole vector each.
        algbw: Median of bytes / (last end - last start) in GB/s, over calls of at least 64 KiB.
        busbw: algbw x the bus factor of nccl-tests, in GB/s.
    """

    name: str
    count: int
    bytes: int  # of all of them, of the whole vector each
    wait: float
    transfer: float
    hidden: float
    algbw: float | None
    busbw: float | None


@dataclass(frozen=True)
class Group:
    """Figures of one process group. Shares refer to the time of its members.

    Attributes:
        wait, transfer: Blocked in communication of the group.
        hidden: Communication of the group in flight while the rank was not blocked (overlap).
        load_balance: mean(b) / max(b) over the members.
    """

    name: str
    size: int
    ranks: list[int]
    wait: float
    transfer: float
    hidden: float
    load_balance: float
    collectives: list[Collective]


def group_figures(
    records: list[Record], matched: MatchedCommunication, timelines: list[Timeline], within: Window
) -> list[Group]:
    """Return the figures of each group of more than one rank that communicated in the window."""
    result = []
    states = [line.states for line in timelines]
    members_of: dict[str, dict[int, dict[str, Any]]] = {}
    for i, record in enumerate(records):
        for group in record.meta.get("groups", {}).values():
            members_of.setdefault(group["name"], {})[i] = group
    count = len(matched.groups)
    each = zip(
        _split_by_group(matched.launches, count), _split_by_group(matched.waits, count), strict=True
    )
    for (name, members), (launches, waits) in zip(sorted(members_of.items()), each, strict=False):
        size = max(int(group["size"]) for group in members.values())
        inside = (launches["start"] >= within.start) & (launches["end"] <= within.end)
        if size < 2 or not inside.any():
            continue
        times = [busy_ns(states[i]) for i in members]

        shares = functools.partial(
            _shares, timelines=timelines, within=within, members=len(members)
        )
        whole = shares(launches, waits)
        result.append(
            Group(
                name,
                size,
                [records[i].rank for i in members],
                *whole,
                sum(times) / len(times) / max(times) if max(times) else 1.0,
                _collective_figures(launches, waits, inside, size, whole, shares),
            )
        )
    return result


def _shares(
    launches: np.ndarray, waits: np.ndarray, timelines: list[Timeline], within: Window, members: int
) -> tuple[float, float, float]:
    """Return wait, transfer and hidden of some communication, as shares of the members' time."""
    start = np.clip(waits["start"], within.start, within.end)
    end = np.clip(waits["end"], within.start, within.end)
    turn = np.clip(waits["latest"], start, end)
    covered = sum(_overlapped_ns(launches, waits, timelines, within))
    whole = members * within.length
    return total(turn - start) / whole, total(end - turn) / whole, covered / whole


def _split_by_group(rows: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """Yield the rows of each group, in the order of records; not copied if there is one group."""
    if count <= 1:
        yield from [rows] * count
        return
    order = np.argsort(rows["group"], kind="stable")
    ends = np.cumsum(np.bincount(rows["group"], minlength=count))
    for mine in np.split(order, ends[:-1]):
        yield rows[mine]


def overlapped_ns(
    matched: MatchedCommunication, timelines: list[Timeline], within: Window
) -> list[int]:
    """Return for how long each rank had communication in flight without being blocked (ns)."""
    return _overlapped_ns(matched.launches, matched.waits, timelines, within)


def _overlapped_ns(
    launches: np.ndarray, waits: np.ndarray, timelines: list[Timeline], within: Window
) -> list[int]:
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
        time = line.cumulative_busy(end) - line.cumulative_busy(start) if len(start) else start
        result.append(int(time.sum()))
    return result


def _collective_figures(
    launches: np.ndarray,
    waits: np.ndarray,
    inside: np.ndarray,
    size: int,
    whole: tuple[float, float, float],
    shares: Callable[[np.ndarray, np.ndarray], tuple[float, float, float]],
) -> list[Collective]:
    """Return the figures of each kind of collective.

    whole: The group's shares. shares: Computes the shares of some of its communication.
    """
    result = []
    for op in np.flatnonzero(np.bincount(launches["op"][inside])).tolist():
        of_op = launches["op"] == op
        mine = inside & of_op
        amount = launches["amount"][mine]
        alone = of_op.all()
        share = whole if alone else shares(launches[of_op], waits[waits["op"] == op])
        if op in POINT_TO_POINT_OPS:
            count = len(amount)
            result.append(Collective(collective_name(op), count, total(amount), *share, None, None))
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
        factor = _BUS_FACTOR.get(op)
        busbw = algbw * factor(size) if algbw is not None and factor is not None else None
        whole_bytes = total(amount_of)
        result.append(Collective(collective_name(op), count, whole_bytes, *share, algbw, busbw))
    return result
