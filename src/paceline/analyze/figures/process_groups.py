"""Figures of each process group by itself: data, tensor and pipeline groups are never mixed."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...record.ring.states import POINT_TO_POINT_OPS, Op
from ..records.match_collectives import MatchedCommunication, split_by_record
from ..records.read_record import Record
from ..records.state_timeline import Timeline, Window, merge_intervals, total
from .losses import name_of
from .pop import busy

# Bytes that cross a link, per byte of the whole vector, for p ranks (as in nccl-tests).
_BUS: dict[int, Callable[[int], float]] = {
    Op.ALL_REDUCE: lambda p: 2 * (p - 1) / p,
    Op.REDUCE_SCATTER: lambda p: (p - 1) / p,
    Op.ALL_GATHER: lambda p: (p - 1) / p,
    Op.ALL_TO_ALL: lambda p: (p - 1) / p,
}


@dataclass(frozen=True)
class Collective:
    """One kind of collective in one group. wait, transfer and hidden as in Group. algbw = bytes /
    time from the last start to the last end, in GB/s, medians over those of at least 64 KiB; busbw
    as in nccl-tests."""

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
    """One process group. Shares are of its members' time: wait and transfer blocked in it,
    hidden in flight without blocking. load_balance = mean(b)/max(b) over its members."""

    name: str
    size: int
    ranks: list[int]
    wait: float
    transfer: float
    hidden: float
    load_balance: float
    collectives: list[Collective]


def groups(
    records: list[Record], matched: MatchedCommunication, timelines: list[Timeline], within: Window
) -> list[Group]:
    """Every group of more than one rank in which something happened in the window."""
    result = []
    states = [line.states for line in timelines]
    members_of: dict[str, dict[int, dict[str, Any]]] = {}
    for i, record in enumerate(records):
        for group in record.meta.get("groups", {}).values():
            members_of.setdefault(group["name"], {})[i] = group
    count = len(matched.groups)
    each = zip(_by_group(matched.launches, count), _by_group(matched.waits, count), strict=True)
    for (name, members), (launches, waits) in zip(sorted(members_of.items()), each, strict=False):
        size = max(int(group["size"]) for group in members.values())
        inside = (launches["start"] >= within.start) & (launches["end"] <= within.end)
        if size < 2 or not inside.any():
            continue
        times = [busy(states[i]) for i in members]

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
                _collectives(launches, waits, inside, size, whole, shares),
            )
        )
    return result


def _shares(
    launches: np.ndarray, waits: np.ndarray, timelines: list[Timeline], within: Window, members: int
) -> tuple[float, float, float]:
    """Wait, transfer and hidden of some communication, as shares of the members' time."""
    start = np.clip(waits["start"], within.start, within.end)
    end = np.clip(waits["end"], within.start, within.end)
    turn = np.clip(waits["latest"], start, end)
    covered = sum(_hidden(launches, waits, timelines, within))
    whole = members * within.length
    return total(turn - start) / whole, total(end - turn) / whole, covered / whole


def _by_group(rows: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """The rows of each group, still in the order of their records; not copied where there is
    one group only."""
    if count <= 1:
        yield from [rows] * count
        return
    order = np.argsort(rows["group"], kind="stable")
    ends = np.cumsum(np.bincount(rows["group"], minlength=count))
    for mine in np.split(order, ends[:-1]):
        yield rows[mine]


def hidden(matched: MatchedCommunication, timelines: list[Timeline], within: Window) -> list[int]:
    """For how long each rank did something else while something of it was in flight (ns)."""
    return _hidden(matched.launches, matched.waits, timelines, within)


def _hidden(
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
        start, end = (np.concatenate([flight[n], blocked[n]]) for n in ("start", "end"))
        start, end = merge_intervals(start, end, within)
        time = line.cumulative_busy(end) - line.cumulative_busy(start) if len(start) else start
        result.append(int(time.sum()))
    return result


def _collectives(
    launches: np.ndarray,
    waits: np.ndarray,
    inside: np.ndarray,
    size: int,
    whole: tuple[float, float, float],
    shares: Callable[[np.ndarray, np.ndarray], tuple[float, float, float]],
) -> list[Collective]:
    """Each kind by itself. whole: the group's shares; shares: of some of its communication."""
    result = []
    for op in np.flatnonzero(np.bincount(launches["op"][inside])).tolist():
        of_op = launches["op"] == op
        mine = inside & of_op
        amount = launches["amount"][mine]
        alone = of_op.all()
        share = whole if alone else shares(launches[of_op], waits[waits["op"] == op])
        if op in POINT_TO_POINT_OPS:
            count = len(amount)
            result.append(Collective(name_of(op), count, total(amount), *share, None, None))
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
        factor = _BUS.get(op)
        busbw = algbw * factor(size) if algbw is not None and factor is not None else None
        whole_bytes = total(amount_of)
        result.append(Collective(name_of(op), count, whole_bytes, *share, algbw, busbw))
    return result
