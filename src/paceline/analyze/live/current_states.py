"""Current state of each rank of a running job, and the ranks missing from collectives.

The state is derived from the operation that a rank began last (``Record.begun``), its newest event
and the clock of its host. Clocks of different hosts are never compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...record.ring.states import (
    BACKGROUND_STATES,
    BESIDE_STATES,
    POINT_TO_POINT_OPS,
    ROOTED_OPS,
    Op,
    State,
)
from ...record.ring.tail import Tail
from ..figures.losses import collective_name
from ..records.read_record import BegunOperation, Record

_IN_FLIGHT = (State.COLLECTIVE, State.BLOCKED, *BACKGROUND_STATES)
_MIN_SILENT_S = 1.0  # without an event, before another thread's collective may explain a rank


@dataclass(frozen=True)
class RankState:
    """The current state of one rank.

    Attributes:
        process: "running", "stopped" or "ended".
        step: Number of completed steps.
        doing: "starting" (no step yet), "input", "checkpoint", "exchange" (blocked in a
            collective), "flight" (a collective is in progress and the rank may compute
            meanwhile), or "script" (none of these).
        for_s: Seconds in this state; None if unknown.
        collective: Name of the collective that it is in.
        group: Name of the collective's process group.
        number: Sequence number of the collective in its group; None for point-to-point operations.
        last: Name of the event that ended last.
        last_s: Seconds since that event ended.
        in_background: Whether another thread than the training one is in the collective, while the
            training records nothing. ``doing`` is the training thread's.
    """

    rank: int
    host: str
    process: str
    step: int
    doing: str
    for_s: float | None
    collective: str | None
    group: str | None
    number: int | None
    last: str | None
    last_s: float | None
    in_background: bool = False


def rank_state(record: Record, tail: Tail) -> RankState:
    """Return the current state of a rank, from its record and its host's clock."""
    events = record.events[~np.isin(record.states, BESIDE_STATES)]
    done = events[events["state"] == State.STEP]["step"]
    step = max(int(events["step"].max(initial=0)), int(done.max()) + 1 if len(done) else 0)
    newest = events[len(events) - 1 - int(events["end"][::-1].argmax())] if len(events) else None
    found = RankState(
        rank=record.rank,
        host=record.host,
        process={"": "ended", "T": "stopped", "t": "stopped"}.get(tail.process, "running"),
        step=step,
        doing="script" if step else "starting",
        for_s=None,
        collective=None,
        group=None,
        number=None,
        last=_describe_last_event(newest, step) if newest is not None else None,
        last_s=age(tail.now, int(newest["end"])) if newest is not None else None,
    )
    return _with_begun_operation(found, record, tail.now) if found.process != "ended" else found


def _with_begun_operation(found: RankState, record: Record, clock: int) -> RankState:
    """Return ``found`` with the operation that the rank began last, unless it has ended."""
    begun = record.begun
    if begun is None or _has_ended(begun, record):
        return _with_background_collective(found, record, clock)
    since = age(clock, begun.since)
    step = max(found.step, begun.step)
    found = replace(found, step=step, for_s=since)
    if begun.state == State.INPUT:
        return replace(found, doing="input")
    if begun.state == State.CHECKPOINT:
        return replace(found, doing="checkpoint")
    collective = _collective(begun, record)
    if collective is None:
        return replace(found, for_s=None)  # the entry is being written at this moment
    doing = "exchange" if begun.state == State.BLOCKED else "flight"
    return replace(found, doing=doing, **collective)


def _collective(begun: BegunOperation, record: Record) -> dict[str, Any] | None:
    """Return the collective's name, group and number; None if the operation is not one."""
    group = record.meta.get("groups", {}).get(str(begun.group))
    if begun.state not in _IN_FLIGHT or group is None or begun.op not in set(Op):
        return None
    return {
        "collective": collective_name(begun.op),
        "group": str(group["name"]),
        "number": begun.seq if begun.op not in POINT_TO_POINT_OPS else None,
    }


def _with_background_collective(found: RankState, record: Record, clock: int) -> RankState:
    """Return ``found`` with another thread's collective, if the rank records nothing else."""
    begun = record.begun_in_background
    if begun is None or (found.last_s or 0.0) < _MIN_SILENT_S or _has_ended(begun, record):
        return found
    collective = _collective(begun, record)
    if collective is None:
        return found
    return replace(found, for_s=age(clock, begun.since), in_background=True, **collective)


def _has_ended(begun: BegunOperation, record: Record) -> bool:
    """Return whether an event records the end of an operation that was begun."""
    events = record.events
    if begun.state in _IN_FLIGHT:
        ended = np.isin(record.states, _IN_FLIGHT)
        same = (events["group"] == begun.group) & (events["seq"] == begun.seq)
        same &= events["end"] > begun.since  # an earlier event is the check that ranks agree
        if begun.op in POINT_TO_POINT_OPS:  # they are numbered separately for each peer
            same &= events["op"] == begun.op
        return bool((ended & same).any())
    return bool(((record.states == begun.state) & (events["start"] >= begun.since)).any())


_ENDED = {
    State.INPUT: "a batch",
    State.FORWARD: "a forward",
    State.LOSS: "a loss",
    State.BACKWARD: "a backward",
    State.OPTIMIZER: "an optimizer's step",
    State.CHECKPOINT: "a checkpoint",
    State.VALIDATION: "a validation",
}


def _describe_last_event(event: Any, step: int) -> str:
    state = State(int(event["state"]))
    if state in (State.STEP, State.OPTIMIZER):
        return f"optimizer step {step}"
    if event["op"]:
        number = "" if event["op"] in POINT_TO_POINT_OPS else f" {int(event['seq'])}"
        return f"{collective_name(int(event['op']))}{number}"
    return _ENDED.get(state, "other work")


def age(clock: int, at: int) -> float:
    """Return the seconds from ``at`` to ``clock``, both in ns on the clock of one host."""
    return max(0, clock - at) / 1e9


@dataclass(frozen=True)
class BlockedCollective:
    """A collective in which ranks are blocked.

    Attributes:
        collective: Name of the collective.
        group: Name of its process group.
        number: Sequence number of the collective in its group.
        for_s: Seconds that the first rank has been in it.
        inside: Ranks that have entered it.
        absent: Members of the group that have not begun it.
        unseen: Number of members without a record.
    """

    collective: str
    group: str
    number: int
    for_s: float
    inside: list[int]
    absent: list[int]
    unseen: int


def blocked_collectives(
    records: Sequence[Record], doing: Sequence[RankState], long_s: float
) -> list[BlockedCollective]:
    """Return the collectives that a rank has been in for ``long_s`` seconds, longest first."""
    found = {
        (now.group, now.collective, now.number)
        for now in doing
        if now.number is not None and now.for_s is not None and now.for_s >= long_s
    }
    result = []
    for group, collective, number in found:
        assert isinstance(group, str)
        assert isinstance(collective, str)
        assert isinstance(number, int)
        inside = [
            n for n in doing if (n.group, n.collective, n.number) == (group, collective, number)
        ]
        members = {r.rank: _last_collective_number(r, group) for r in records}
        reached = {rank: last for rank, last in members.items() if last is not None}
        groups = [one for r in records for one in r.meta.get("groups", {}).values()]
        sizes = [int(one["size"]) for one in groups if one["name"] == group]
        result.append(
            BlockedCollective(
                collective=collective,
                group=group,
                number=number,
                for_s=max(now.for_s or 0.0 for now in inside),
                inside=[now.rank for now in inside],
                absent=[rank for rank, last in reached.items() if last < number],
                unseen=max(0, max(sizes) - len(reached)),
            )
        )
    return sorted(result, key=lambda one: -one.for_s)


def with_device_waits(records: Sequence[Record], doing: Sequence[RankState]) -> list[RankState]:
    """Return the states, with the collectives in which the GPUs of silent ranks wait.

    A collective of a GPU has ended for the host when it is launched. A rank that then reads a value
    waits for the device. Its first collective that another member of the group has not launched is
    what the device waits in.
    """
    return [
        _with_device_wait(record, now, records) for record, now in zip(records, doing, strict=True)
    ]


def _with_device_wait(record: Record, now: RankState, records: Sequence[Record]) -> RankState:
    is_silent = (
        now.doing in ("starting", "script", "checkpoint") and (now.last_s or 0.0) >= _MIN_SILENT_S
    )
    if record.meta.get("device") != "cuda" or now.process != "running" or not is_silent:
        return now
    for number, group in record.meta.get("groups", {}).items():
        name = str(group["name"])
        reached = [_last_collective_number(record, name) for record in records]
        own = _last_collective_number(record, name) or 0
        awaited = min((last for last in reached if last is not None), default=own) + 1
        events = record.events
        launched = events[(events["group"] == int(number)) & (events["seq"] == awaited)]
        ops = [op for op in launched["op"].tolist() if op not in POINT_TO_POINT_OPS]
        if awaited <= own and ops and ops[0] not in ROOTED_OPS:
            collective = collective_name(ops[0])
            found = replace(now, doing="exchange", for_s=now.last_s, collective=collective)
            return replace(found, group=name, number=awaited)
    return now


def _last_collective_number(record: Record, name: str) -> int | None:
    """Return the number of the last collective that a rank has begun in a group.

    None if the rank is not a member of the group.
    """
    numbers = [int(n) for n, g in record.meta.get("groups", {}).items() if g["name"] == name]
    if not numbers:
        return None
    events = record.events
    own = (events["group"] == numbers[0]) & (events["op"] > 0)
    own &= ~np.isin(events["op"], POINT_TO_POINT_OPS)
    last = int(events["seq"][own].max(initial=0))
    for begun in (record.begun, record.begun_in_background):
        if begun is not None and begun.group == numbers[0] and begun.op not in POINT_TO_POINT_OPS:
            last = max(last, begun.seq)
    return last
