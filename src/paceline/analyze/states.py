"""Every instant of a rank's window in exactly one state, as docs/measures.md defines them.

Events overlap (a blocked wait lies inside a backward, input inside a validation). Of all events
that cover an instant the one that comes first in ``ORDER`` counts. A state's time is then the
growth of a union of intervals, in whole nanoseconds, so the states add up to the window exactly.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..record.states import ROOTED, USEFUL, Op, State
from .read import Record

Ints = npt.NDArray[np.int64]

ORDER = ("wait", "transfer", "checkpoint", "validation", "input", "useful")
STATES = ("useful", "input", "checkpoint", "validation", "other", "wait", "transfer")


@dataclass(frozen=True)
class Window:
    """One interval on the common clock, the same for every rank (ns)."""

    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def window(records: list[Record]) -> Window | None:
    """From the end of every rank's first step (the warm-up, or the first that a ring still
    holds) to the last event of all; None where a rank has fewer than two steps."""
    steps = [record.of(State.STEP) for record in records]
    if not steps or min(len(step) for step in steps) < 2:
        return None
    start = max(int(step["end"].min()) for step in steps)
    end = max(int(record.events["end"].max()) for record in records)
    return Window(start, end) if end > start else None


def covered(start: Ints, end: Ints, within: Window) -> int:
    """Length of the union of intervals, clipped to the window."""
    start, end = np.maximum(start, within.start), np.minimum(end, within.end)
    real = end > start
    start, end = start[real], end[real]
    if not len(start):
        return 0
    by_start = np.argsort(start, kind="stable")
    start, end = start[by_start], end[by_start]
    reached = np.maximum.accumulate(end)
    before = np.concatenate(([start[0]], reached[:-1]))
    return int((reached - np.maximum(start, before)).clip(min=0).sum())


def latest_starts(records: list[Record]) -> tuple[list[Ints], int]:
    """For each BLOCKED event of each record: when the last member that it had to wait for
    arrived; and how many collectives lack a member's record.

    Rooted operations wait for the root only. Sends and receives are not matched yet: their
    whole time counts as transfer.
    """
    rows = [record.of(State.COLLECTIVE) for record in records]
    names = sorted({g["name"] for r in records for g in r.meta.get("groups", {}).values()})
    start = np.concatenate([row["start"] for row in rows])
    key = np.concatenate([_keys(r, row, names) for r, row in zip(records, rows, strict=True)])
    own = np.concatenate([_group_ranks(r, row) for r, row in zip(records, rows, strict=True)])
    size = np.concatenate([_group_sizes(r, row) for r, row in zip(records, rows, strict=True)])
    op = np.concatenate([row["op"] for row in rows])
    peer = np.concatenate([row["peer"] for row in rows])

    matched = ~np.isin(op, (Op.SEND, Op.RECV))
    unique, place = np.unique(key[matched], return_inverse=True)
    last = np.full(len(unique), np.iinfo(np.int64).min)
    np.maximum.at(last, place, start[matched])
    members = np.bincount(place, minlength=len(unique))
    wanted = np.zeros(len(unique), dtype=np.int64)
    np.maximum.at(wanted, place, size[matched])
    is_root = np.isin(op, ROOTED) & (own == peer)
    root = np.full(len(unique), np.iinfo(np.int64).min)
    np.maximum.at(root, place[is_root[matched]], start[matched & is_root])

    result = []
    for record in records:
        row = record.of(State.BLOCKED)
        found = np.searchsorted(unique, _keys(record, row, names))
        found = np.minimum(found, max(len(unique) - 1, 0))
        latest = last[found] if len(unique) else row["start"].copy()
        rooted = np.isin(row["op"], ROOTED)
        mine = _group_ranks(record, row) == row["peer"]
        gathers = np.isin(row["op"], (Op.REDUCE, Op.GATHER))
        waits_for_root = rooted & ~mine
        if len(unique):
            latest = np.where(waits_for_root, root[found], latest)
        never = (rooted & mine & ~gathers) | np.isin(row["op"], (Op.SEND, Op.RECV))
        result.append(np.where(never, row["start"], latest).astype(np.int64))
    return result, int((members < wanted).sum())


def _group_field(record: Record, row: npt.NDArray[np.void], field: str) -> Ints:
    groups = record.meta.get("groups", {})
    table = np.zeros(max([int(n) for n in groups] + [0]) + 1, dtype=np.int64)
    for number, group in groups.items():
        table[int(number)] = group[field]
    return np.asarray(table[row["group"]], dtype=np.int64)


def _group_ranks(record: Record, row: npt.NDArray[np.void]) -> Ints:
    return _group_field(record, row, "rank")


def _group_sizes(record: Record, row: npt.NDArray[np.void]) -> Ints:
    return _group_field(record, row, "size")


def _keys(record: Record, row: npt.NDArray[np.void], names: list[str]) -> Ints:
    """(group, sequence number) as one number; groups by name, which is the same on all ranks."""
    groups = record.meta.get("groups", {})
    table = np.zeros(max([int(n) for n in groups] + [0]) + 1, dtype=np.int64)
    for number, group in groups.items():
        table[int(number)] = names.index(group["name"])
    return np.asarray((table[row["group"]] << 32) + row["seq"], dtype=np.int64)


def states(record: Record, latest: Ints, within: Window) -> dict[str, int]:
    """Nanoseconds of the window in each of STATES; they add up to its length."""
    blocked = record.of(State.BLOCKED)
    turn = np.clip(latest, blocked["start"], blocked["end"])
    useful = record.of(*USEFUL)
    events = {
        "wait": (blocked["start"], turn),
        "transfer": (turn, blocked["end"]),
        "checkpoint": _both(record, State.CHECKPOINT),
        "validation": _both(record, State.VALIDATION),
        "input": _both(record, State.INPUT),
        "useful": (useful["start"], useful["end"]),
    }
    result, so_far = {}, 0
    start, end = np.empty(0, np.int64), np.empty(0, np.int64)
    for name in ORDER:
        start = np.concatenate([start, events[name][0]])
        end = np.concatenate([end, events[name][1]])
        union = covered(start, end, within)
        result[name], so_far = union - so_far, union
    result["other"] = within.length - so_far
    return {name: result[name] for name in STATES}


def _both(record: Record, state: State) -> tuple[Ints, Ints]:
    row = record.of(state)
    return row["start"], row["end"]
