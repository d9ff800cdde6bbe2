"""Find short disturbances that a run survived: ranks that stood still, exchanges that stalled.

A rank stood still where its stack sampler could not run and its other threads did nothing. An
exchange stalled where all its ranks had arrived, none of them stood still, and it took many times
longer than usual.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...record.ring.states import POINT_TO_POINT_OPS, State
from ..records.match_collectives import split_by_record
from ..records.read_record import Record
from ..records.state_timeline import STATES, Ints, Timeline, Window, blocking_states
from .losses import collective_name, rows_by_value, script_line
from .measured_window import MeasuredWindow
from .steps import StepTimes
from .window_steps import Steps

RankInterval = tuple[int, int, int]  # start, end (ns), index of the record
# Start, end (ns), index of the record, row among its waits, usual time (ns).
SlowExchange = tuple[int, int, int, int, float]
STILL, STALLED = "still", "stalled"  # used as the state that explains an outlier
MAX_LISTED = 1000  # standstills, and stalls
_MIN_STALL_NS = int(1e9)
_MIN_SLOWDOWN = 10.0  # times its usual time
_MIN_SIMILAR = 5  # similar exchanges of one rank, for a usual time
_MIN_EXPLAINED = 0.5  # of the time that a step, or an exchange, took longer


@dataclass(frozen=True)
class Standstill:
    """Ranks of one host of which no thread ran.

    Attributes:
        whole: Whether these are several ranks, and all of the host.
        at_s: Seconds since the job's start.
        seconds: How long they stood still.
        waited_s: Longest time that another rank waited for them meanwhile. None where there is no
            other rank, or no common clock.
        line: The script's line at the end of the standstill; None if it was not sampled.
        state: The state in which most of it lay; None outside of the measured window.
    """

    ranks: list[int]
    host: str
    whole: bool
    step: int
    at_s: float
    seconds: float
    waited_s: float | None
    line: dict[str, object] | None = None
    state: str | None = None


@dataclass(frozen=True)
class Stall:
    """A collective or message that took much longer than usual.

    Attributes:
        number: None for a message.
        rank: A rank that was blocked in it.
        hosts: Number of hosts that the group's members are on.
        at_s: Seconds since the job's start, when all members had arrived.
        seconds: From the arrival of the last member until ``rank`` could go on.
        usual_s: Median of this rank's exchanges of the same kind, group and size.
    """

    collective: str
    group: str
    number: int | None
    rank: int
    hosts: int
    step: int
    at_s: float
    seconds: float
    usual_s: float


def find_standstills(m: MeasuredWindow) -> list[Standstill]:
    """Return the standstills, longest first; ranks of one host that stood still together are
    one.
    """
    by_host: dict[str, list[RankInterval]] = {}
    scope = _scope(m)
    for i, record in enumerate(m.records):
        rows = record.events_in(State.STILL)
        rows = rows[(rows["end"] > scope.start) & (rows["start"] < scope.end)]
        for start, end in zip(rows["start"].tolist(), rows["end"].tolist(), strict=True):
            by_host.setdefault(record.host, []).append((start, end, i))
    # the long ones, which are few: each standstill scans them
    waits = m.matched.waits
    is_long = (waits["end"] - waits["start"] > _MIN_STALL_NS // 10) & (m.blocked.wait > 0)
    waits = waits[is_long] if by_host else waits[:0]
    parts = [
        (host, part) for host in by_host for part in _group_simultaneous(sorted(by_host[host]))
    ]
    parts.sort(key=lambda both: -max(end - start for start, end, _ in both[1]))
    return [_make_standstill(m, host, part, waits) for host, part in parts[:MAX_LISTED]]


def _scope(m: MeasuredWindow) -> Window:
    """The window; where that is a GPU's sampled steps, all after the first step."""
    if not all(record.on_gpu for record in m.records):
        return m.within
    first = (record.events_in(State.STEP)["end"][:1] for record in m.records)
    start = max((int(end[0]) for end in first if len(end)), default=m.within.start)
    return Window(start, max(int(record.events["end"].max()) for record in m.records))


def _group_simultaneous(spans: list[RankInterval]) -> Iterator[list[RankInterval]]:
    """Group intervals, ordered by start, that overlap in time.

    Ranks stood still together if each began before half of the first one's interval was over.
    """
    part: list[RankInterval] = []
    for span in spans:
        if part and span[0] >= (part[0][0] + part[0][1]) / 2:
            yield part
            part = []
        part.append(span)
    if part:
        yield part


def _make_standstill(
    m: MeasuredWindow, host: str, part: list[RankInterval], waits: Any
) -> Standstill:
    who = {i for _, _, i in part}
    there = {i for i, record in enumerate(m.records) if record.host == host}
    start, end, i = max(part, key=lambda span: span[1] - span[0])
    waited = None
    if not m.clocks_unaligned and len(who) < len(m.records):
        rows = waits[np.isin(waits["culprit"], list(who)) & ~np.isin(waits["record"], list(who))]
        until = np.minimum(np.minimum(rows["latest"], rows["end"]), end)
        held = (until - np.maximum(rows["start"], start)).clip(min=0)
        waited = float(np.bincount(rows["record"], held, minlength=1).max()) / 1e9
    return Standstill(
        ranks=sorted(m.records[one].rank for one in who),
        host=host,
        whole=who == there and len(who) > 1,
        step=_step_at(m, i, start),
        at_s=(start - _job_start_ns(m)) / 1e9,
        seconds=(end - start) / 1e9,
        waited_s=waited,
        line=_line_at(m.records[i], end),
        state=_longest_state(m.timelines[i], start, end),
    )


def _line_at(record: Record, end: int) -> dict[str, object] | None:
    """Return the line of the sample with which a standstill ended: a late one."""
    samples = record.events_in(State.SAMPLE)
    at_end = samples["amount"][samples["start"] == end]
    known = record.lines.get(int(at_end[0])) if len(at_end) else None
    return script_line(known) if known is not None else None


def _longest_state(line: Timeline, start: int, end: int) -> str | None:
    """Return the state in which a rank was longest between two times."""
    spent = np.diff(line.cumulative_by_state([start, end]), axis=0)[0]
    return STATES[int(spent.argmax())] if spent.any() else None


def _step_at(m: MeasuredWindow, i: int, at: int) -> int:
    """Return the number of the step in which a record's rank was at a time (ns)."""
    rows = m.records[i].events_in(State.STEP)
    after = rows["step"][rows["end"] > at]
    return int(after[0]) if len(after) else int(rows["step"].max(initial=0)) + 1


def _job_start_ns(m: MeasuredWindow) -> int:
    return min(int(record.meta["started_ns"]) for record in m.records)


def find_stalls(m: MeasuredWindow, still: list[Standstill]) -> list[Stall]:
    """Return the stalls, longest first; of simultaneous ones only the longest."""
    waits = m.matched.waits
    if m.clocks_unaligned or not len(waits):
        return []
    is_slow = m.blocked.transfer >= _MIN_STALL_NS + m.residual_ns
    is_slow &= waits["whole"] & ~waits["call"]
    slow_exchanges: list[SlowExchange] = []
    rows = split_by_record(waits, len(m.records))
    for i in np.unique(waits["record"][is_slow]).tolist():
        record = m.records[i]
        if record.meta.get("device") == "cuda" and not record.on_gpu:
            continue  # who has launched it may still compute
        first = int(np.searchsorted(waits["record"], i))
        slow_exchanges += _slow_exchanges(
            m, i, rows[i], np.flatnonzero(is_slow[first : first + len(rows[i])])
        )
    longest = sorted(_longest_of_overlapping(slow_exchanges), key=lambda one: one[0] - one[1])
    stalls = [
        _make_stall(m, i, row, rows[i][row], usual) for _, _, i, row, usual in longest[:MAX_LISTED]
    ]
    return [
        one
        for one in stalls
        if not any(
            _overlap(each, one.at_s, one.at_s + one.seconds) >= _MIN_EXPLAINED * one.seconds
            for each in still
        )
    ]


def _longest_of_overlapping(found: list[SlowExchange]) -> Iterator[SlowExchange]:
    """Return of overlapping exchanges only the longest."""
    best, until = None, 0
    for one in sorted(found):
        if best is not None and one[0] >= until:
            yield best
            best = None
        best = one if best is None else max(best, one, key=lambda both: both[1] - both[0])
        until = max(until, one[1])
    if best is not None:
        yield best


def _slow_exchanges(m: MeasuredWindow, i: int, rows: Any, which: Ints) -> list[SlowExchange]:
    """Return one record's slow exchanges that took many times the usual time of their kind,
    group and size.
    """
    amount = m.records[i].events_in(*blocking_states(m.records[i]))["amount"]
    size = np.frexp(amount.astype(np.float64))[1].astype(np.int64)
    kind = (rows["group"].astype(np.int64) << 16) | (rows["op"].astype(np.int64) << 8) | size
    kind[rows["call"] | ~rows["whole"]] = -1
    took = (rows["end"] - rows["latest"]).clip(min=0)
    found = []
    is_slow = np.zeros(len(rows), bool)
    is_slow[which] = True
    wanted = np.flatnonzero(np.isin(kind, kind[which]))
    for _, at in rows_by_value(kind[wanted]):
        alike = wanted[at]
        usual = float(np.median(took[alike]))
        if len(alike) >= _MIN_SIMILAR:
            mine = alike[is_slow[alike] & (took[alike] >= _MIN_SLOWDOWN * usual)]
            spans = zip(rows["latest"][mine].tolist(), rows["end"][mine].tolist(), strict=True)
            found += [(*span, i, row, usual) for span, row in zip(spans, mine, strict=True)]
    return found


def _make_stall(m: MeasuredWindow, i: int, row: int, wait: Any, usual: float) -> Stall:
    record, began = m.records[i], _job_start_ns(m)
    message = int(wait["op"]) in POINT_TO_POINT_OPS
    name = m.matched.groups[int(wait["group"])]
    groups = ((record, record.meta.get("groups", {}).values()) for record in m.records)
    hosts = {one.host for one, mine in groups if any(group["name"] == name for group in mine)}
    return Stall(
        collective=collective_name(int(wait["op"])),
        group=name,
        number=None if message else int(record.events_in(*blocking_states(record))["seq"][row]),
        rank=record.rank,
        hosts=len(hosts),
        step=_step_at(m, i, int(wait["end"]) - 1),
        at_s=(int(wait["latest"]) - began) / 1e9,
        seconds=(int(wait["end"]) - int(wait["latest"])) / 1e9,
        usual_s=usual / 1e9,
    )


def explain_outliers(
    m: MeasuredWindow, steps: Steps, times: StepTimes, still: list[Standstill], stalled: list[Stall]
) -> StepTimes:
    """Return the step times, with outliers explained by standstills and stalls where they are
    the cause.
    """
    step_ends, began = steps.bounds.max(axis=0), _job_start_ns(m)
    disturbances: list[Standstill | Stall] = [*still, *stalled]
    outliers = []
    for outlier in times.outliers:
        begin, end = (
            (int(step_ends[outlier.step - steps.first + n]) - began) / 1e9 for n in (0, 1)
        )
        longer_s = outlier.seconds - times.median_s
        shares = [_overlap(disturbance, begin, end) for disturbance in disturbances]
        if shares and max(shares) >= _MIN_EXPLAINED * longer_s:
            cause = disturbances[int(np.argmax(shares))]
            state = STILL if isinstance(cause, Standstill) else STALLED
            single_rank = (
                cause.ranks[0] if isinstance(cause, Standstill) and len(cause.ranks) == 1 else None
            )
            outlier = replace(outlier, state=state, rank=single_rank, longer_s=longer_s)
        outliers.append(outlier)
    return replace(times, outliers=outliers)


def _overlap(disturbance: Standstill | Stall, start: float, end: float) -> float:
    """Return for how many seconds a disturbance overlaps an interval (s since the job's start)."""
    return min(end, disturbance.at_s + disturbance.seconds) - max(start, disturbance.at_s)
