"""Brief trouble that a run survived: ranks that stood still, and exchanges that stalled.

A rank stood still where its sampler could not run and nothing else of it did. An exchange stalled
where all its ranks had come, none of them stood still, and it took many times what is usual.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...record.ring.states import POINT_TO_POINT_OPS, State
from ..records.match_collectives import split_by_record
from ..records.state_timeline import Ints, Window, blocking_states
from .losses import apart, name_of
from .measured_window import Measured
from .steps import Steps, StepTimes

Span = tuple[int, int, int]  # start, end, and whose: the number of the record
Slow = tuple[int, int, int, int, float]  # the same, the row among its waits, its usual time
STILL, STALLED = "still", "stalled"  # in the place of the state that explains an outlier
MOST = 1000  # of each that are told one by one
_STALL = int(1e9)  # ns: what is over earlier is no stall
_TIMES = 10.0  # times its usual time
_KNOWN = 5  # exchanges alike of one rank that make a time the usual one
_EXPLAINS = 0.5  # of the time that a step, or an exchange, took longer


@dataclass(frozen=True)
class Still:
    """No thread of ``ranks``, which are on one host, ran for ``seconds``. whole: these are
    several, and all that are there. at_s: since the job's start. waited_s: how long another rank
    waited for them meanwhile, at most; None where there is none, or no common clock."""

    ranks: list[int]
    host: str
    whole: bool
    step: int
    at_s: float
    seconds: float
    waited_s: float | None


@dataclass(frozen=True)
class Stall:
    """An exchange that took ``seconds`` from when all had come until ``rank``, which was in it,
    could go on; usual_s is the median of its others alike. number: None for a message. hosts: on
    how many its members are."""

    collective: str
    group: str
    number: int | None
    rank: int
    hosts: int
    step: int
    at_s: float
    seconds: float
    usual_s: float


def standstills(m: Measured) -> list[Still]:
    """The longest first; ranks of one host that stood still together are one."""
    by_host: dict[str, list[Span]] = {}
    scope = _scope(m)
    for i, record in enumerate(m.records):
        rows = record.events_in(State.STILL)
        rows = rows[(rows["end"] > scope.start) & (rows["start"] < scope.end)]
        for start, end in zip(rows["start"].tolist(), rows["end"].tolist(), strict=True):
            by_host.setdefault(record.host, []).append((start, end, i))
    waits = m.matched.waits[_long(m)] if by_host else m.matched.waits[:0]
    parts = [(host, part) for host in by_host for part in _together(sorted(by_host[host]))]
    parts.sort(key=lambda both: -max(end - start for start, end, _ in both[1]))
    return [_still(m, host, part, waits) for host, part in parts[:MOST]]


def _scope(m: Measured) -> Window:
    """The window; where that is a GPU's sampled steps, all after the first step."""
    if not all(record.on_gpu for record in m.records):
        return m.within
    first = (record.events_in(State.STEP)["end"][:1] for record in m.records)
    start = max((int(end[0]) for end in first if len(end)), default=m.within.start)
    return Window(start, max(int(record.events["end"].max()) for record in m.records))


def _long(m: Measured) -> Any:
    """Waits that may be for one that stood still: few, so that each standstill can look."""
    return m.matched.waits["end"] - m.matched.waits["start"] > _STALL // 10


def _together(spans: list[Span]) -> Iterator[list[Span]]:
    """Spans in the order of their starts, apart by time: those of ranks that stood still together
    begin before the first of them is half over."""
    part: list[Span] = []
    for span in spans:
        if part and span[0] >= (part[0][0] + part[0][1]) / 2:
            yield part
            part = []
        part.append(span)
    if part:
        yield part


def _still(m: Measured, host: str, part: list[Span], waits: Any) -> Still:
    who = {i for _, _, i in part}
    there = {i for i, record in enumerate(m.records) if record.host == host}
    start, end, i = max(part, key=lambda span: span[1] - span[0])
    waited = None
    if not m.apart and len(who) < len(m.records):
        rows = waits[np.isin(waits["culprit"], list(who)) & ~np.isin(waits["record"], list(who))]
        until = np.minimum(np.minimum(rows["latest"], rows["end"]), end)
        held = (until - np.maximum(rows["start"], start)).clip(min=0)
        waited = float(np.bincount(rows["record"], held, minlength=1).max()) / 1e9
    return Still(
        ranks=sorted(m.records[one].rank for one in who),
        host=host,
        whole=who == there and len(who) > 1,
        step=_step(m, i, start),
        at_s=(start - _started(m)) / 1e9,
        seconds=(end - start) / 1e9,
        waited_s=waited,
    )


def _step(m: Measured, i: int, at: int) -> int:
    """The number of the step that a record's rank was in."""
    rows = m.records[i].events_in(State.STEP)
    after = rows["step"][rows["end"] > at]
    return int(after[0]) if len(after) else int(rows["step"].max(initial=0)) + 1


def _started(m: Measured) -> int:
    return min(int(record.meta["started_ns"]) for record in m.records)


def stalls(m: Measured, still: list[Still]) -> list[Stall]:
    """The longest first; of those at the same time the longest only."""
    waits = m.matched.waits
    if m.apart or not len(waits):
        return []
    blocked = waits["end"] - np.maximum(waits["start"], waits["latest"])
    slow = (blocked >= _STALL + m.residual) & waits["whole"] & ~waits["call"]
    slow &= (waits["end"] > m.within.start) & (waits["start"] < m.within.end)
    found: list[Slow] = []
    rows = split_by_record(waits, len(m.records))
    for i in np.unique(waits["record"][slow]).tolist():
        record = m.records[i]
        if record.meta.get("device") == "cuda" and not record.on_gpu:
            continue  # who has launched it may still compute
        first = int(np.searchsorted(waits["record"], i))
        found += _of_record(m, i, rows[i], np.flatnonzero(slow[first : first + len(rows[i])]))
    longest = sorted(_longest(found), key=lambda one: one[0] - one[1])[:MOST]
    told = [_stall(m, i, row, rows[i][row], usual) for _, _, i, row, usual in longest]
    return [
        one
        for one in told
        if not any(
            _overlap(each, one.at_s, one.at_s + one.seconds) >= _EXPLAINS * one.seconds
            for each in still
        )
    ]


def _longest(found: list[Slow]) -> Iterator[Slow]:
    """Of those that overlap the longest."""
    best, until = None, 0
    for one in sorted(found):
        if best is not None and one[0] >= until:
            yield best
            best = None
        best = one if best is None else max(best, one, key=lambda both: both[1] - both[0])
        until = max(until, one[1])
    if best is not None:
        yield best


def _of_record(m: Measured, i: int, rows: Any, which: Ints) -> list[Slow]:
    """Those of one record's slow exchanges that took many times what is usual for their kind
    and size in their group."""
    amount = m.records[i].events_in(*blocking_states(m.records[i]))["amount"]
    size = np.frexp(amount.astype(np.float64))[1].astype(np.int64)
    kind = (rows["group"].astype(np.int64) << 16) | (rows["op"].astype(np.int64) << 8) | size
    kind[rows["call"] | ~rows["whole"]] = -1
    took = (rows["end"] - rows["latest"]).clip(min=0)
    found = []
    is_slow = np.zeros(len(rows), bool)
    is_slow[which] = True
    wanted = np.flatnonzero(np.isin(kind, kind[which]))
    for _, at in apart(kind[wanted]):
        alike = wanted[at]
        usual = float(np.median(took[alike]))
        if len(alike) >= _KNOWN:
            mine = alike[is_slow[alike] & (took[alike] >= _TIMES * usual)]
            spans = zip(rows["latest"][mine].tolist(), rows["end"][mine].tolist(), strict=True)
            found += [(*span, i, row, usual) for span, row in zip(spans, mine, strict=True)]
    return found


def _stall(m: Measured, i: int, row: int, wait: Any, usual: float) -> Stall:
    record, began = m.records[i], _started(m)
    message = int(wait["op"]) in POINT_TO_POINT_OPS
    name = m.matched.groups[int(wait["group"])]
    groups = ((one, one.meta.get("groups", {}).values()) for one in m.records)
    hosts = {one.host for one, mine in groups if any(group["name"] == name for group in mine)}
    return Stall(
        collective=name_of(int(wait["op"])),
        group=name,
        number=None if message else int(record.events_in(*blocking_states(record))["seq"][row]),
        rank=record.rank,
        hosts=len(hosts),
        step=_step(m, i, int(wait["end"]) - 1),
        at_s=(int(wait["latest"]) - began) / 1e9,
        seconds=(int(wait["end"]) - int(wait["latest"])) / 1e9,
        usual_s=usual / 1e9,
    )


def explained(
    m: Measured, steps: Steps, times: StepTimes, still: list[Still], stalled: list[Stall]
) -> StepTimes:
    """The step times, with what made a step stand out where it was one of these."""
    ends, began = steps.bounds.max(axis=0), _started(m)
    troubles: list[Still | Stall] = [*still, *stalled]
    outliers = []
    for one in times.outliers:
        begin, end = ((int(ends[one.step - steps.first + n]) - began) / 1e9 for n in (0, 1))
        longer = one.seconds - times.median_s
        shares = [_overlap(each, begin, end) for each in troubles]
        if shares and max(shares) >= _EXPLAINS * longer:
            cause = troubles[int(np.argmax(shares))]
            state = STILL if isinstance(cause, Still) else STALLED
            alone = cause.ranks[0] if isinstance(cause, Still) and len(cause.ranks) == 1 else None
            one = replace(one, state=state, rank=alone, longer_s=longer)
        outliers.append(one)
    return replace(times, outliers=outliers)


def _overlap(trouble: Still | Stall, start: float, end: float) -> float:
    """How much of a time (s since the job's start) it takes up."""
    return min(end, trouble.at_s + trouble.seconds) - max(start, trouble.at_s)
