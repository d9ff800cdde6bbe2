"""Where the time that is not useful went, by cause: whom each wait was for and what that rank
was doing, transfers by group and collective, and the ranks' own losses.

All shares are of the ranks' time together (P x T), so they add up to 1 - useful.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...record.ring.states import Op, State
from ..records.match_collectives import NO_INDEX, MatchedCommunication
from ..records.read_record import Record
from ..records.state_timeline import OTHER, STATES, Ints, Timeline, Window, total
from .pop import LOSSES

BINS = 10  # ranges of steps that losses are located in
AT_ONCE = 200_000  # ns between two waits with no work to speak of between them
PART = 1 << 16  # rows that are looked at together, which bounds the memory
MOST = 0.8  # of a loss lies in the range of steps that is named


@dataclass(frozen=True)
class Loss:
    """One cause's share of all ranks' time in the window.

    kind: wait, transfer, checkpoint, validation, input or other. For a wait, ``rank`` is whom
    it was for and ``doing`` the state that rank was longer in; None where it was for nobody in
    particular (below the clocks' residual, or without a record). For the others ``rank`` is the
    one where it is largest, and ``most`` its share of that rank's time.
    """

    kind: str
    share: float
    rank: int | None = None
    host: str | None = None
    doing: str | None = None
    group: str | None = None
    collective: str | None = None
    steps: tuple[int, int] | None = None  # first and last step of the range with most of it
    most: float | None = None
    lines: list[dict[str, object]] = field(default_factory=list)


@dataclass(frozen=True)
class Ranges:
    """Ranges of steps: edges in time (ns), and the number of the first step in each."""

    edges: Ints
    steps: list[int]

    def narrow(self, weights: npt.NDArray[np.float64]) -> tuple[int, int] | None:
        """First and last step of the shortest run of ranges with MOST of ``weights``."""
        total = float(weights.sum())
        if total <= 0:
            return None
        count = len(weights)
        sums = np.concatenate(([0.0], np.cumsum(weights)))
        for length in range(1, count + 1):
            inside = sums[length:] - sums[:-length]
            if inside.max() >= MOST * total:
                first = int(inside.argmax())
                return self.steps[first], self.steps[first + length] - 1
        return self.steps[0], self.steps[-1] - 1


def ranges(records: list[Record], within: Window, bins: int = BINS) -> Ranges:
    """The window's steps in ``bins`` ranges of the same number of steps, each as all ranks have
    done them."""
    steps = [record.events_in(State.STEP)[["step", "end"]] for record in records]
    steps = [s[(s["end"] > within.start) & (s["end"] <= within.end)] for s in steps]
    first = min((int(s["step"].min()) for s in steps if len(s)), default=0)
    last = max((int(s["step"].max()) + 1 for s in steps if len(s)), default=first + 1)
    bounds = np.unique(np.linspace(first, last, min(bins, last - first) + 1).astype(int))
    edges = [within.start]
    for bound in bounds[1:-1]:
        done = [int(s["end"][s["step"] < bound].max()) for s in steps if (s["step"] < bound).any()]
        edges.append(max([*done, edges[-1]]))
    return Ranges(np.array([*edges, within.end], np.int64), bounds.tolist())


def waits(
    records: list[Record],
    timelines: list[Timeline],
    matched: MatchedCommunication,
    within: Window,
    where: Ranges,
    residual: int,
) -> list[Loss]:
    """Every wait booked to whom it was for, and to what that rank had done more than the one
    that waits since both were last together (at the end of the group's previous wait).

    What it does during the wait itself says less: a rank whose batch came late is computing
    by the time the others wait for it.
    """
    rows = matched.waits
    start = np.clip(rows["start"], within.start, within.end)
    turn = np.clip(np.minimum(rows["latest"], rows["end"]), start, within.end)
    length = turn - start
    whole = len(records) * within.length
    known = np.flatnonzero((rows["culprit"] != NO_INDEX) & (length > residual))
    unknown = total(length[(length > 0)]) - total(length[known])
    together = np.clip(_together(rows), within.start, start)[known]
    rows, start, turn, length = rows[known], start[known], turn[known], length[known]
    own = np.zeros((len(rows), len(STATES)), np.float32)
    for number, mine in apart(rows["record"]):
        line = timelines[number]
        own[mine] = line.cumulative_by_state(turn[mine]) - line.cumulative_by_state(together[mine])
    result = []
    for culprit, mine in apart(rows["culprit"]):
        line, record = timelines[culprit], records[culprit]
        more = np.empty((len(mine), len(STATES)))
        for part in range(0, len(mine), PART):
            some = mine[part : part + PART]
            by = np.clip(
                line.cumulative_by_state(turn[some])
                - line.cumulative_by_state(together[some])
                - own[some],
                0,
                None,
            )
            each = by.sum(axis=1, keepdims=True)
            by = np.where(each > 0, by / np.maximum(each, 1), _one(line.state_at(turn[some] - 1)))
            more[part : part + PART] = by
        for state in range(len(STATES)):
            weights = more[:, state] * length[mine]
            if weights.sum() <= 0:
                continue
            group, op = _most(rows["group"][mine], rows["op"][mine], weights)
            result.append(
                Loss(
                    "wait",
                    float(weights.sum()) / whole,
                    record.rank,
                    record.host,
                    STATES[state],
                    matched.groups[group],
                    name_of(op),
                    where.narrow(_binned(start[mine], weights, where)),
                )
            )
    if unknown > 0:
        result.append(Loss("wait", float(unknown) / whole))
    return result


def apart(values: Ints) -> Iterable[tuple[int, Ints]]:
    """Each value, and the rows that have it."""
    order = np.argsort(values, kind="stable")
    unique, first = np.unique(values[order], return_index=True)
    return zip(unique.tolist(), np.split(order, first[1:]), strict=False)


def _together(rows: npt.NDArray[Any]) -> Ints:
    """For each wait, when the rank was last together with its group: the end of the last wait
    before the rank went to work again. Waits that follow each other at once (the buckets of one
    backward) are one. Far back for the first."""
    order = np.lexsort((rows["end"], rows["group"], rows["record"]))
    start, end = rows["start"][order], rows["end"][order]
    same = np.zeros(len(rows), bool)
    for name in ("record", "group"):
        same[1:] |= rows[name][order][1:] != rows[name][order][:-1]
    same = ~same
    before = np.concatenate(([np.iinfo(np.int64).min], end[:-1])) if len(rows) else end
    begins = ~same | (start - before > AT_ONCE)
    begins[:1] = True
    first = np.maximum.accumulate(np.where(begins, np.arange(len(rows)), 0))
    result = np.empty(len(rows), np.int64)
    result[order] = np.where(same[first], before[first], np.iinfo(np.int64).min)
    return result


def _one(state: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """1 for each row's state, 0 for all others."""
    return np.asarray(np.eye(len(STATES))[state], np.float64)


def transfers(
    matched: MatchedCommunication, ranks: int, within: Window, where: Ranges
) -> list[Loss]:
    """Blocked time after the last member has arrived, by group and collective."""
    rows = matched.waits
    turn = np.clip(rows["latest"], rows["start"], rows["end"])
    start = np.clip(turn, within.start, within.end)
    length = np.clip(rows["end"], within.start, within.end) - start
    result = []
    real = np.flatnonzero(length > 0)
    kind = rows["group"][real].astype(np.int64) << 8 | rows["op"][real]
    for one, at in apart(kind):
        group, op, mine = one >> 8, one & 0xFF, real[at]
        weights = length[mine].astype(np.float64)
        share = float(weights.sum()) / (ranks * within.length)
        steps = where.narrow(_binned(start[mine], weights, where))
        result.append(
            Loss(
                "transfer", share, group=matched.groups[group], collective=name_of(op), steps=steps
            )
        )
    return result


def own(records: list[Record], timelines: list[Timeline], where: Ranges) -> list[Loss]:
    """What ranks lose by themselves: checkpoint, validation, input, other."""
    length = int(where.edges[-1] - where.edges[0])
    spent = np.stack([line.cumulative_by_state(where.edges) for line in timelines]).astype(
        np.float64
    )
    per_range = np.diff(spent, axis=1)  # (ranks, ranges, states)
    result = []
    for kind in LOSSES:
        times = per_range[:, :, STATES.index(kind)]
        if not times.any():
            continue
        by_rank = times.sum(axis=1)
        most = int(by_rank.argmax())
        result.append(
            Loss(
                kind,
                float(by_rank.mean()) / length,
                records[most].rank,
                records[most].host,
                steps=where.narrow(times.sum(axis=0)),
                most=float(by_rank[most]) / length,
                lines=lines_in(records, timelines, STATES.index(kind)),
            )
        )
    return result


def lines_in(
    records: Iterable[Record], timelines: Iterable[Timeline], state: int = OTHER
) -> list[dict[str, object]]:
    """The script's lines that samples found it in while it was in ``state``, most frequent
    first: file, line, function, code, inside (module.function of the library that it was in, if
    any) and share of these samples."""
    found: dict[tuple[str, ...], tuple[int, dict[str, object]]] = {}
    for record, line in zip(records, timelines, strict=True):
        samples = record.events_in(State.SAMPLE)
        inside = (samples["start"] >= line.edges[0]) & (samples["start"] < line.edges[-1])
        samples = samples[inside]
        for number in samples["amount"][line.state_at(samples["start"]) == state].tolist():
            known = record.lines.get(number)
            if known is not None:
                place = tuple(str(known.get(name)) for name in ("file", "line", "inside"))
                found[place] = (found.get(place, (0, {}))[0] + 1, known)
    total = sum(count for count, _ in found.values())
    best = sorted(found.values(), key=lambda both: -both[0])[:5]
    names = ("file", "line", "function", "inside", "code")
    return [
        {**{name: known.get(name) for name in names}, "share": count / total}
        for count, known in best
    ]


def name_of(op: int) -> str:
    """all-reduce, broadcast ..."""
    return Op(op).name.lower().replace("_", "-") if op in set(Op) else f"operation {op}"


def _binned(times: Ints, weights: npt.NDArray[np.float64], where: Ranges) -> np.ndarray:
    at = np.clip(np.searchsorted(where.edges, times, "right") - 1, 0, len(where.edges) - 2)
    return np.bincount(at, weights, minlength=len(where.edges) - 1)


def _most(group: Ints, op: Ints, weights: npt.NDArray[np.float64]) -> tuple[int, int]:
    """The group and collective with the most weight."""
    key = group.astype(np.int64) << 8 | op
    kinds, at = np.unique(key, return_inverse=True)
    best = int(kinds[np.bincount(at, weights).argmax()])
    return best >> 8, best & 0xFF
