"""Match the communication events of different ranks: who arrived last, and who was blocked by it.

Collectives are matched by (group, number), sends and receives by (group, from, to, number).
Groups are identified by their name, which is the same on all members.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...record.ring.states import LAUNCH_STATES, POINT_TO_POINT_OPS, ROOTED_OPS, Op, State
from .read_record import Record
from .state_timeline import Ints, Timeline, Window, blocking_states, is_pipeline_group

NO_INDEX = -1
UNKNOWN_GROUP = "unknown"  # of a GPU kernel whose collective is not known


@dataclass(frozen=True)
class MatchedCommunication:
    """The communication of all records, matched.

    Attributes:
        launches: One row per COLLECTIVE or BACKGROUND_COLLECTIVE event: record, start, end, node,
            op, group, amount (bytes), whole (whether the records of all members are there),
            background (launched by another thread than the one that trains).
        waits: One row per BLOCKED or CALL event: record, start, end, node, op, group, step, latest
            (start of the launch that it waits for), culprit (the record of that launch, or
            NO_INDEX), whole, root, call (the launching call itself, which waits for no other rank).
        node_rows: ``node_launches[node_rows[n]:node_rows[n + 1]]`` are the launches of node n. A
            node is what one wait depends on: all launches of one collective, the root's launch
            alone, or the other side of a message.
        node_launches: Rows of ``launches``, ordered by node.
        groups: Names of the process groups; the ``group`` of a row is an index into them.
    """

    launches: npt.NDArray[Any]
    waits: npt.NDArray[Any]
    node_rows: Ints
    node_launches: Ints
    groups: list[str]

    def count_unmatched(self, within: Window | None = None) -> int:
        """Return the number of collectives and messages that lack a member's record."""
        incomplete = self.launches[~self.launches["whole"]]
        if within is not None:
            inside = (incomplete["end"] > within.start) & (incomplete["start"] < within.end)
            incomplete = incomplete[inside]
        return len(np.unique(incomplete["node"]))

    def latest_arrivals(self, count: int) -> list[Ints]:
        """Return, for each of ``count`` records and each of its BLOCKED and CALL events, when the
        last member that it waits for had arrived (ns).
        """
        return [np.asarray(rows["latest"], np.int64) for rows in split_by_record(self.waits, count)]


def split_by_record(rows: npt.NDArray[Any], count: int) -> list[npt.NDArray[Any]]:
    """Split launches or waits, which are in the order of their records, by record."""
    ends = np.cumsum(np.bincount(rows["record"], minlength=count))
    return np.split(rows, ends[:-1])


_LAUNCH_FIELDS = [("record", "i4"), ("start", "i8"), ("end", "i8"), ("op", "u1"), ("group", "i4")]
_LAUNCH_FIELDS += [("amount", "i8"), ("node", "i8"), ("whole", "?"), ("background", "?")]
_WAIT_FIELDS = [("record", "i4"), ("start", "i8"), ("end", "i8"), ("op", "u1"), ("group", "i4")]
_WAIT_FIELDS += [
    ("step", "u4"),
    ("node", "i8"),
    ("latest", "i8"),
    ("culprit", "i4"),
    ("whole", "?"),
]
_WAIT_FIELDS += [("root", "?"), ("call", "?")]


def match_collectives(records: list[Record]) -> MatchedCommunication:
    """Match the communication of all records. Their times must be on one clock."""
    names = sorted({g["name"] for r in records for g in r.meta.get("groups", {}).values()})
    group_index = {name: i for i, name in enumerate(names)}
    launches, keys, group_facts = _collect_rows(records, launch_states, _LAUNCH_FIELDS, group_index)
    if not (known_collective := keys[:, 1] > 0).all():  # a kernel whose collective is not known
        known = (rows[known_collective] for rows in (launches, keys, group_facts))
        launches, keys, group_facts = known
    waits, wait_keys, wait_group_facts = _collect_rows(
        records, blocking_states, _WAIT_FIELDS, group_index
    )
    if any((rows["group"] == len(group_index)).any() for rows in (launches, waits)):
        names.append(UNKNOWN_GROUP)
    collective_of_launch, collective_of_wait, has_launch = _number_collectives(keys, wait_keys)
    del keys, wait_keys
    launches["node"] = collective_of_launch
    present_members = np.bincount(collective_of_launch)
    count = len(present_members)
    expected_members = np.zeros(count, np.int64)
    np.maximum.at(expected_members, collective_of_launch, group_facts["size"])
    # By collective, then by start: the last row of a collective is its latest launch.
    order = np.lexsort((launches["start"], collective_of_launch))
    rows = np.concatenate(([0], np.cumsum(present_members)))
    if not count:
        waits["latest"], waits["culprit"], waits["node"] = waits["start"], NO_INDEX, NO_INDEX
        return MatchedCommunication(launches, waits, rows, order, names)
    last = order[rows[1:] - 1][collective_of_wait]
    late_record, late_start = launches["record"][last], launches["start"][last]
    waits["whole"] = (present_members >= expected_members)[collective_of_wait] & has_launch
    launches["whole"] = (present_members >= expected_members)[collective_of_launch]
    node_of_wait = collective_of_wait.copy()

    waits["root"] = wait_group_facts["root"]
    deciding_launch, waits_for_no_rank = _find_deciding_launches(
        launches, waits, group_facts["root"], collective_of_launch, collective_of_wait
    )
    waits_for_no_rank |= ~has_launch
    has_deciding_launch = (deciding_launch != NO_INDEX) & ~waits_for_no_rank
    late_record = np.where(has_deciding_launch, launches["record"][deciding_launch], late_record)
    late_start = np.where(has_deciding_launch, launches["start"][deciding_launch], late_start)
    waits_for_no_rank |= sends_only(waits) & (late_start > waits["end"])
    has_deciding_launch &= ~waits_for_no_rank
    waits_for_no_other = waits_for_no_rank | (late_record == waits["record"])
    waits["latest"] = np.where(waits_for_no_rank, waits["start"], late_start)
    waits["culprit"] = np.where(
        waits_for_no_other | (late_start <= waits["start"]), NO_INDEX, late_record
    )
    deciding_launches, deciding_index = np.unique(
        deciding_launch[has_deciding_launch], return_inverse=True
    )
    node_of_wait[has_deciding_launch] = count + deciding_index
    node_of_wait[waits_for_no_rank] = NO_INDEX
    waits["node"] = node_of_wait
    rows = np.concatenate((rows, rows[-1] + 1 + np.arange(len(deciding_launches))))
    order = np.concatenate((order, deciding_launches))
    return MatchedCommunication(launches, waits, rows, order, names)


def _number_collectives(keys: Ints, wait_keys: Ints) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    """Number the collectives that were launched, from 0.

    Args:
        keys, wait_keys: Keys of the launches and of the waits, of shape (rows, 2).

    Returns:
        The number of each launch's collective, that of each wait's, and whether a launch of the
        latter is known: else its number is that of another one.
    """
    unique_pairs, pair = np.unique(keys[:, 0], return_inverse=True)
    unique, collective_of_launch = np.unique(pair << 32 | keys[:, 1], return_inverse=True)
    if not len(unique):
        none = np.zeros(len(wait_keys), np.int64)
        return collective_of_launch, none, none > 0
    # A BLOCKED event belongs to a COLLECTIVE event of the same rank, unless the ring overwrote it.
    wait_pair = np.minimum(np.searchsorted(unique_pairs, wait_keys[:, 0]), len(unique_pairs) - 1)
    is_known = (unique_pairs[wait_pair] == wait_keys[:, 0]) & (wait_keys[:, 1] > 0)
    wait_key = np.where(is_known, wait_pair << 32 | wait_keys[:, 1], NO_INDEX)
    collective_of_wait = np.minimum(np.searchsorted(unique, wait_key), len(unique) - 1)
    return collective_of_launch, collective_of_wait, unique[collective_of_wait] == wait_key


def sends_only(waits: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which waits only send data: a sender's, or a member's of a rooted reduction.

    They may end before the other side arrives.
    """
    sends_to_root = np.isin(waits["op"], (Op.REDUCE, Op.GATHER)) & ~waits["root"]
    return np.asarray((waits["op"] == Op.SEND) | sends_to_root)


def _find_deciding_launches(
    launches: npt.NDArray[Any],
    waits: npt.NDArray[Any],
    is_root: Ints,
    collective_of_launch: Ints,
    collective_of_wait: Ints,
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return for each wait the launch that decides when it can end, and whether it waits at all.

    The launch is the root's of a collective or the other side's of a message; NO_INDEX where it is
    the last of all members. The second array is true for waits that depend on no other rank.
    """
    count = int(collective_of_launch.max(initial=-1)) + 1
    launch_of_collective = {}
    for kind, is_kind in (
        ("root", np.isin(launches["op"], ROOTED_OPS) & is_root),
        ("send", launches["op"] == Op.SEND),
        ("recv", launches["op"] == Op.RECV),
    ):
        table = np.full(count, NO_INDEX)
        table[collective_of_launch[is_kind]] = np.flatnonzero(is_kind)
        launch_of_collective[kind] = table
    rooted = np.isin(waits["op"], ROOTED_OPS)
    deciding_launch = np.select(
        [rooted & ~waits["root"], waits["op"] == Op.RECV, waits["op"] == Op.SEND],
        [launch_of_collective[kind][collective_of_wait] for kind in ("root", "send", "recv")],
        NO_INDEX,
    )
    reduces_to_root = np.isin(waits["op"], (Op.REDUCE, Op.GATHER))
    needs_deciding_launch = (rooted & ~waits["root"]) | np.isin(waits["op"], POINT_TO_POINT_OPS)
    waits_for_no_rank = (
        (rooted & waits["root"] & ~reduces_to_root)
        | waits["call"]
        | (needs_deciding_launch & (deciding_launch == NO_INDEX))
    )
    return deciding_launch, waits_for_no_rank


def launch_states(record: Record) -> tuple[State, ...]:
    """Return the states of communication in flight, of all threads."""
    return (State.COMMUNICATION_KERNEL,) if record.communicates_on_gpu else LAUNCH_STATES


def _collect_rows(
    records: list[Record],
    states_of: Callable[[Record], tuple[State, ...]],
    fields: list[tuple[str, str]],
    group_index: dict[str, int],
) -> tuple[npt.NDArray[Any], Ints, npt.NDArray[Any]]:
    """Return the rows of all records with ``fields``, their keys, and what each record knows of its
    group.

    A key is two integers: the group (for messages also both sides), and the number. The last array
    has the group's size, and whether the record's rank is the root.
    """
    count = sum(record.count(*states_of(record)) for record in records)
    rows = np.zeros(count, fields)
    keys = np.zeros((count, 2), np.int64)
    group_facts = np.zeros(count, [("size", "i8"), ("root", "?")])
    start = 0
    for i, record in enumerate(records):
        events = record.events_in(*states_of(record))
        rows_of_record = slice(start, start + len(events))
        start += len(events)
        record_rows = rows[rows_of_record]
        for name in ("start", "end", "op", "amount", "step"):
            if name in (record_rows.dtype.names or ()):
                record_rows[name] = events[name]
        record_rows["record"] = i
        if "call" in (record_rows.dtype.names or ()):
            record_rows["call"] = events["state"] == State.CALL
        if "background" in (record_rows.dtype.names or ()):
            record_rows["background"] = events["state"] == State.BACKGROUND_COLLECTIVE
        group = _by_group_number(record, lambda g: group_index[g["name"]])[events["group"]]
        group[events["group"] == 0] = len(group_index)
        own_rank = _by_group_number(record, lambda g: g["rank"])[events["group"]]
        size = _by_group_number(record, lambda g: g["size"])[events["group"]]
        record_rows["group"] = group
        peer = events["peer"].astype(np.int64)
        sends, p2p = (
            events["op"] == Op.SEND,
            events["op"] >= Op.SEND,
        )  # SEND and RECV are the last two of Op
        source, target = np.where(sends, own_rank, peer), np.where(sends, peer, own_rank)
        pair = np.where(p2p, (1 << 62) | (source + 1) << 15 | (target + 1), 0)
        keys[rows_of_record, 0] = pair | group << 32
        keys[rows_of_record, 1] = events["seq"]
        group_facts["size"][rows_of_record] = np.where(p2p, 2, size)
        group_facts["root"][rows_of_record] = own_rank == peer
    return rows, keys, group_facts


def _by_group_number(record: Record, value: Any) -> Ints:
    """Return ``value(group)`` of each of a record's groups, indexed by the number of the group."""
    groups = record.meta.get("groups", {})
    table = np.zeros(max([int(n) for n in groups] + [0]) + 1, np.int64)
    for n, group in groups.items():
        table[int(n)] = value(group)
    return table


# Blocked time of each rank's timeline, by the communication that blocked it
#
# Communications of one rank may overlap each other, and on a GPU also computing. Losses, groups and
# the matrix of waits use the times computed here, so each of them adds up to the timeline's states.


@dataclass(frozen=True)
class BlockedTime:
    """Exposed time of each row of ``MatchedCommunication.waits`` in the window (ns).

    Attributes:
        wait: Time in the state wait. The rows of a record add up to its timeline's state.
        transfer, bubble: The same for these states.
    """

    wait: Ints
    transfer: Ints
    bubble: Ints

    def by_record(self, waits: npt.NDArray[Any], count: int) -> Iterator[tuple[Ints, Ints]]:
        """Yield wait and transfer of the rows of ``waits`` of each record."""
        ends = np.cumsum([len(rows) for rows in split_by_record(waits, count)])[:-1]
        return zip(np.split(self.wait, ends), np.split(self.transfer, ends), strict=True)


def assign_blocked_time(matched: MatchedCommunication, timelines: list[Timeline]) -> BlockedTime:
    """Book every blocked instant of the timelines to one row of ``matched.waits``.

    Of several communications that block a rank at the same time, the one that began first counts.
    """
    found: dict[str, list[Ints]] = {"wait": [], "transfer": [], "bubble": []}
    pipelines = np.array([is_pipeline_group(name) for name in matched.groups], bool)
    for rows, line in zip(split_by_record(matched.waits, len(timelines)), timelines, strict=True):
        start, end = rows["start"].astype(np.int64), rows["end"].astype(np.int64)
        turn = np.clip(rows["latest"], start, end)
        in_pipeline = pipelines[rows["group"]]
        for state, of in (("bubble", in_pipeline), ("wait", ~in_pipeline)):
            times = np.zeros(len(rows), np.int64)
            times[of] = _exposed(line, state, start[of], turn[of])
            found[state].append(times)
        found["transfer"].append(_exposed(line, "transfer", turn, end))
    return BlockedTime(**{state: np.concatenate(times) for state, times in found.items()})


def _exposed(line: Timeline, state: str, start: Ints, end: Ints) -> Ints:
    """Return for each interval the time of ``state`` in it that lies in no earlier interval."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    end = np.maximum.accumulate(end)
    start[1:] = np.maximum(start[1:], end[:-1])
    result = np.empty(len(order), np.int64)
    result[order] = line.cumulative_in(state, end) - line.cumulative_in(state, start)
    return result
