"""Which events of different ranks belong together, and who arrived last.

Collectives are matched by (group, number), sends and receives by (group, from, to, number).
Groups go by name, which is the same on all their members.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...record.ring.states import POINT_TO_POINT_OPS, ROOTED_OPS, Op, State
from .read_record import Record
from .state_timeline import Ints, blocking, total

NOBODY = -1
UNKNOWN_GROUP = "unknown"  # of a GPU's kernel whose collective is not known


@dataclass(frozen=True)
class Matched:
    """The communication of all records, and how it belongs together.

    ``launches`` (COLLECTIVE): record, start, end, node, op, group, amount, whole (all members'
    records are there). ``waits`` (BLOCKED, CALL): record, start, end, node, op, group, step,
    latest (start of whom it waits for), culprit (whose record that is, or NOBODY), whole, root,
    call (the launching call itself, which waits for nobody). A node is what one wait may depend
    on: all launches of one collective, its root's alone, or a message's other side;
    ``node_rows[n]`` to ``node_rows[n + 1]`` in ``node_launches`` are its launches.
    """

    launches: npt.NDArray[Any]
    waits: npt.NDArray[Any]
    node_rows: Ints
    node_launches: Ints
    groups: list[str]

    def unmatched(self, start: int = 0, end: int = 1 << 62) -> tuple[int, int]:
        """Collectives and messages between two times that lack a member's record, and the
        blocked time in them (ns)."""
        lack = self.launches[~self.launches["whole"]]
        lack = lack[(lack["end"] > start) & (lack["start"] < end)]
        rows = self.waits[~self.waits["whole"]]
        blocked = np.minimum(rows["end"], end) - np.maximum(rows["start"], start)
        return len(np.unique(lack["node"])), total(blocked.clip(min=0))

    def latest(self, count: int) -> list[Ints]:
        """For each of ``count`` records, and each of its BLOCKED and CALL events: when whom it
        waits for had arrived."""
        return [np.asarray(rows["latest"], np.int64) for rows in by_record(self.waits, count)]


def by_record(rows: npt.NDArray[Any], count: int) -> list[npt.NDArray[Any]]:
    """Launches or waits, which are in the order of their records, apart by record."""
    ends = np.cumsum(np.bincount(rows["record"], minlength=count))
    return np.split(rows, ends[:-1])


_LAUNCH = [("record", "i4"), ("start", "i8"), ("end", "i8"), ("op", "u1"), ("group", "i4")]
_LAUNCH += [("amount", "i8"), ("node", "i8"), ("whole", "?")]
_WAIT = [("record", "i4"), ("start", "i8"), ("end", "i8"), ("op", "u1"), ("group", "i4")]
_WAIT += [("step", "u4"), ("node", "i8"), ("latest", "i8"), ("culprit", "i4"), ("whole", "?")]
_WAIT += [("root", "?"), ("call", "?")]


def match(records: list[Record]) -> Matched:
    """Match the communication of all records; times must be on one clock."""
    names = sorted({g["name"] for r in records for g in r.meta.get("groups", {}).values()})
    number = {name: i for i, name in enumerate(names)}
    launches, keys, mine = _rows(records, _launching, _LAUNCH, number)
    if not (real := keys[:, 1] > 0).all():  # a kernel whose collective is not known
        launches, keys, mine = launches[real], keys[real], mine[real]
    waits, wait_keys, wait_mine = _rows(records, blocking, _WAIT, number)
    if any((rows["group"] == len(number)).any() for rows in (launches, waits)):
        names.append(UNKNOWN_GROUP)
    pairs, pair = np.unique(keys[:, 0], return_inverse=True)
    unique, place = np.unique(pair << 32 | keys[:, 1], return_inverse=True)
    # A BLOCKED event has a COLLECTIVE of its own rank, unless the ring has overwritten it.
    wait_pair = np.minimum(np.searchsorted(pairs, wait_keys[:, 0]), max(len(pairs) - 1, 0))
    known = pairs[wait_pair] == wait_keys[:, 0] if len(pairs) else np.zeros(len(waits), bool)
    known &= wait_keys[:, 1] > 0
    wait_key = np.where(known, wait_pair << 32 | wait_keys[:, 1], NOBODY)
    del keys, pair, wait_keys, wait_pair, known
    launches["node"] = place
    members = np.bincount(place, minlength=len(unique))
    wanted = np.zeros(len(unique), np.int64)
    np.maximum.at(wanted, place, mine["size"])
    # Launches in the order of their collective, and of their start in it: the last is last.
    order = np.lexsort((launches["start"], place))
    rows = np.concatenate(([0], np.cumsum(members)))
    last = order[rows[1:] - 1] if len(unique) else np.empty(0, np.int64)

    if not len(unique):
        waits["latest"], waits["culprit"], waits["node"] = waits["start"], NOBODY, NOBODY
        return Matched(launches, waits, rows, order, names)
    found = np.minimum(np.searchsorted(unique, wait_key), len(unique) - 1)
    who, when = launches["record"][last][found], launches["start"][last][found]
    met = unique[found] == wait_key
    waits["whole"] = (members >= wanted)[found] & met
    launches["whole"] = (members >= wanted)[place]
    node = found.copy()

    waits["root"] = wait_mine["root"]
    alone, nobody = _deciding(launches, waits, mine["root"], place, found)
    nobody |= ~met
    has_one = (alone != NOBODY) & ~nobody
    who = np.where(has_one, launches["record"][alone], who)
    when = np.where(has_one, launches["start"][alone], when)
    nobody |= gives(waits) & (when > waits["end"])
    has_one &= ~nobody
    own_turn = nobody | (who == waits["record"])
    waits["latest"] = np.where(nobody, waits["start"], when)
    waits["culprit"] = np.where(own_turn | (when <= waits["start"]), NOBODY, who)
    extra, at = np.unique(alone[has_one], return_inverse=True)
    node[has_one] = len(unique) + at
    node[nobody] = NOBODY
    waits["node"] = node
    rows = np.concatenate((rows, rows[-1] + 1 + np.arange(len(extra))))
    order = np.concatenate((order, extra))
    return Matched(launches, waits, rows, order, names)


def gives(waits: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Waits of who sends, or is no root of a reduction: it may be done before the other side
    comes."""
    reduces = np.isin(waits["op"], (Op.REDUCE, Op.GATHER)) & ~waits["root"]
    return np.asarray((waits["op"] == Op.SEND) | reduces)


def _deciding(
    launches: npt.NDArray[Any], waits: npt.NDArray[Any], is_root: Ints, place: Ints, found: Ints
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """For each wait, the one launch that decides when it can end (a collective's root, a
    message's other side; NOBODY where it is the last of all), and whether it waits for nobody."""
    count = int(place.max(initial=-1)) + 1
    single = {}
    for kind, chosen in (
        ("root", np.isin(launches["op"], ROOTED_OPS) & is_root),
        ("send", launches["op"] == Op.SEND),
        ("recv", launches["op"] == Op.RECV),
    ):
        table = np.full(count, NOBODY)
        table[place[chosen]] = np.flatnonzero(chosen)
        single[kind] = table
    rooted = np.isin(waits["op"], ROOTED_OPS)
    alone = np.full(len(waits), NOBODY)
    alone = np.where(rooted & ~waits["root"], single["root"][found], alone)
    alone = np.where(waits["op"] == Op.RECV, single["send"][found], alone)
    alone = np.where(waits["op"] == Op.SEND, single["recv"][found], alone)
    gathers = np.isin(waits["op"], (Op.REDUCE, Op.GATHER))
    needs_one = (rooted & ~waits["root"]) | np.isin(waits["op"], POINT_TO_POINT_OPS)
    nobody = (rooted & waits["root"] & ~gathers) | waits["call"] | (needs_one & (alone == NOBODY))
    return alone, nobody


def _launching(record: Record) -> tuple[State, ...]:
    return (State.COMMUNICATION_KERNEL,) if record.on_gpu else (State.COLLECTIVE,)


def _rows(
    records: list[Record],
    chosen: Callable[[Record], tuple[State, ...]],
    fields: list[tuple[str, str]],
    number: dict[str, int],
) -> tuple[npt.NDArray[Any], Ints, npt.NDArray[Any]]:
    """Rows of all records with ``fields``, their keys (two integers each), and what each record
    knows of the row's group: its size, and whether it is the root."""
    count = sum(record.count(*chosen(record)) for record in records)
    rows = np.zeros(count, fields)
    keys = np.zeros((count, 2), np.int64)
    mine = np.zeros(count, [("size", "i8"), ("root", "?")])
    start = 0
    for i, record in enumerate(records):
        part = record.of(*chosen(record))
        place = slice(start, start + len(part))
        start += len(part)
        row = rows[place]
        for name in ("start", "end", "op", "amount", "step"):
            if name in (row.dtype.names or ()):
                row[name] = part[name]
        row["record"] = i
        if "call" in (row.dtype.names or ()):
            row["call"] = part["state"] == State.CALL
        group = _table(record, lambda g: number[g["name"]])[part["group"]]
        group[part["group"] == 0] = len(number)
        own = _table(record, lambda g: g["rank"])[part["group"]]
        size = _table(record, lambda g: g["size"])[part["group"]]
        row["group"] = group
        peer = part["peer"].astype(np.int64)
        sends, p2p = part["op"] == Op.SEND, part["op"] >= Op.SEND  # the last two
        source, target = np.where(sends, own, peer), np.where(sends, peer, own)
        # group and, for messages, both sides; then the number
        pair = np.where(p2p, (1 << 62) | (source + 1) << 15 | (target + 1), 0)
        keys[place, 0] = pair | group << 32
        keys[place, 1] = part["seq"]
        mine["size"][place] = np.where(p2p, 2, size)
        mine["root"][place] = own == peer
    return rows, keys, mine


def _table(record: Record, value: Any) -> Ints:
    """What ``value`` says of each of a record's groups, by the number of the group."""
    groups = record.meta.get("groups", {})
    table = np.zeros(max([int(n) for n in groups] + [0]) + 1, np.int64)
    for n, group in groups.items():
        table[int(n)] = value(group)
    return table
