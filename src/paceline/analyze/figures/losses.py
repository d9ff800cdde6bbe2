"""Attribute the time that is not useful to causes.

Waits are attributed to the rank that arrived last and to what it was doing, transfers to the group
and collective, and the other losses to the ranks. All shares are of the ranks' time together
(P x T), so they add up to 1 - useful.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...record.ring.states import Op, State
from ..records.match_collectives import NO_INDEX, BlockedTime, MatchedCommunication, split_by_record
from ..records.read_record import Record
from ..records.state_timeline import OTHER, STATES, Ints, Timeline, Window, mostly_starved_in, total
from .pop import LOSSES, Efficiencies
from .window_steps import Floats, Occurrence, Steps, loader_starts, occurrence

RANGE_COUNT = 10  # ranges of steps in which losses are located
MAX_GAP_NS = 200_000  # between two waits that count as one: no work in between
CHUNK_ROWS = 1 << 16  # rows processed at once, which bounds the memory
MIN_PLACED_SHARE = 1e-4  # a smaller loss is not placed in single steps
MIN_SHARE_IN_RANGE = 0.8  # of a loss, in the range of steps that the report names


@dataclass(frozen=True)
class Loss:
    """One cause's share of all ranks' time in the window.

    Attributes:
        kind: wait, transfer, checkpoint, validation, input, starved or other.
        rank: For a wait, the rank that it was for; None where the culprit is unknown (below the
            clocks' residual, or without a record). For the other kinds, the rank with the largest
            loss.
        doing: For a wait, the state in which ``rank`` was longer than the waiting rank. For
            starved, the state in which most of it lay, on all ranks together.
        steps: First and last step of the range of tenths with most of the loss.
        occurs: The steps that have it; None for a tiny loss, or where ranks share no steps.
        most: Share of the time of ``rank``, not for waits.
    """

    kind: str
    share: float
    rank: int | None = None
    host: str | None = None
    doing: str | None = None
    group: str | None = None
    collective: str | None = None
    steps: tuple[int, int] | None = None
    occurs: Occurrence | None = None
    most: float | None = None
    lines: list[dict[str, object]] = field(default_factory=list)


@dataclass(frozen=True)
class StepRanges:
    """Ranges of steps: edges in time (ns), and the number of the first step in each."""

    edges: Ints
    steps: list[int]

    def narrow(self, weights: npt.NDArray[np.float64]) -> tuple[int, int] | None:
        """Return the first and last step of the shortest run of ranges with most of ``weights``."""
        total = float(weights.sum())
        if total <= 0:
            return None
        count = len(weights)
        sums = np.concatenate(([0.0], np.cumsum(weights)))
        for length in range(1, count + 1):
            inside = sums[length:] - sums[:-length]
            if inside.max() >= MIN_SHARE_IN_RANGE * total:
                first = int(inside.argmax())
                return self.steps[first], self.steps[first + length] - 1
        return self.steps[0], self.steps[-1] - 1


def split_into_ranges(records: list[Record], within: Window) -> StepRanges:
    """Split the window's steps into ``RANGE_COUNT`` ranges of equally many steps.

    The edge of a range is the time at which all ranks have completed its last step.
    """
    steps = [record.events_in(State.STEP)[["step", "end"]] for record in records]
    steps = [s[(s["end"] > within.start) & (s["end"] <= within.end)] for s in steps]
    first = min((int(s["step"].min()) for s in steps if len(s)), default=0)
    last = max((int(s["step"].max()) + 1 for s in steps if len(s)), default=first + 1)
    bounds = np.unique(np.linspace(first, last, min(RANGE_COUNT, last - first) + 1).astype(int))
    edges = [within.start]
    for bound in bounds[1:-1]:
        done = [int(s["end"][s["step"] < bound].max()) for s in steps if (s["step"] < bound).any()]
        edges.append(max([*done, edges[-1]]))
    return StepRanges(np.array([*edges, within.end], np.int64), bounds.tolist())


class LossPlaces:
    """Finds the steps in which a loss occurs.

    Attributes:
        ranges: The window's ranges of steps.
        steps: Its single steps; None where the ranks have none in common.
    """

    def __init__(
        self,
        records: list[Record],
        matched: MatchedCommunication,
        ranges: StepRanges,
        steps: Steps | None,
    ) -> None:
        self.ranges, self.steps = ranges, steps
        self._loader_starts = loader_starts(records, steps) if steps is not None else None
        self._step_of_wait = np.empty(0, np.int64)
        if steps is not None and len(matched.waits):
            parts = split_by_record(matched.waits, len(records))
            self._step_of_wait = np.concatenate(
                [steps.index_of(i, rows["start"]) for i, rows in enumerate(parts)]
            )

    def of_waits(
        self, rows: Ints, start: Ints, weights: Floats, share: float, state: str
    ) -> dict[str, Any]:
        """Return ``steps`` and ``occurs`` of a Loss.

        rows: Indices in ``matched.waits``. start: Their starts in the window (ns). weights: The
        loss of each (ns). state: What it was spent in.
        """
        found: dict[str, Any] = {
            "steps": self.ranges.narrow(_sum_by_range(start, weights, self.ranges))
        }
        if self.steps is not None and share >= MIN_PLACED_SHARE:
            by_step = np.bincount(self._step_of_wait[rows], weights, minlength=len(self.steps) + 1)
            found["occurs"] = self._occurrence(np.asarray(by_step, np.float64), state)
        return found

    def of_states(
        self, by_range: Floats, by_step: Floats | None, share: float, state: str
    ) -> dict[str, Any]:
        """Return ``steps`` and ``occurs`` of a Loss with these times in ranges and steps (ns)."""
        found: dict[str, Any] = {"steps": self.ranges.narrow(by_range)}
        if by_step is not None and by_step.any() and share >= MIN_PLACED_SHARE:
            found["occurs"] = self._occurrence(by_step, state)
        return found

    def _occurrence(self, by_step: Floats, state: str) -> Occurrence:
        assert self.steps is not None
        return occurrence(by_step, self.steps, self._loader_starts if state == "input" else None)


def wait_losses(
    records: list[Record],
    timelines: list[Timeline],
    matched: MatchedCommunication,
    blocked: BlockedTime,
    within: Window,
    place: LossPlaces,
    residual: int,
) -> list[Loss]:
    """Book every exposed wait to the rank that it was for, and to what that rank had done.

    What counts is what it had done more than the waiting rank since both were last together (at the
    end of the group's previous wait). What it does during the wait says less: a rank whose batch
    came late already computes while the others wait for it.
    """
    rows = matched.waits
    start = np.clip(rows["start"], within.start, within.end)
    last_arrival = np.clip(np.minimum(rows["latest"], rows["end"]), start, within.end)
    total_ns = len(records) * within.length
    known = np.flatnonzero(attributed_waits(matched, blocked, within, residual))
    unknown = total(blocked.wait) - total(blocked.wait[known])
    together = np.clip(last_together(rows), within.start, start)[known]
    rows, start, last_arrival = rows[known], start[known], last_arrival[known]
    length = blocked.wait[known]
    own_states = np.zeros((len(rows), len(STATES)), np.float32)
    for number, of_value in rows_by_value(rows["record"]):
        line = timelines[number]
        own_states[of_value] = line.cumulative_by_state(
            last_arrival[of_value]
        ) - line.cumulative_by_state(together[of_value])
    result = []
    for culprit, of_value in rows_by_value(rows["culprit"]):
        record = records[culprit]
        excess_shares = np.empty((len(of_value), len(STATES)))
        for part in range(0, len(of_value), CHUNK_ROWS):
            chunk = of_value[part : part + CHUNK_ROWS]
            excess_shares[part : part + CHUNK_ROWS] = _excess_shares(
                timelines[culprit], together[chunk], last_arrival[chunk], own_states[chunk]
            )
        for state in range(len(STATES)):
            weights = excess_shares[:, state] * length[of_value]
            if weights.sum() <= 0:
                continue
            group, op = _largest_kind(rows["group"][of_value], rows["op"][of_value], weights)
            share = float(weights.sum()) / total_ns
            where = (known[of_value], start[of_value], weights, share, STATES[state])
            result.append(
                Loss(
                    "wait",
                    share,
                    record.rank,
                    record.host,
                    STATES[state],
                    matched.groups[group],
                    collective_name(op),
                    **place.of_waits(*where),
                )
            )
    if unknown > 0:
        result.append(Loss("wait", float(unknown) / total_ns))
    return result


def _excess_shares(
    line: Timeline, together: Ints, last_arrival: Ints, own_states: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    """Return what a rank had done more than each of those that waited for it.

    Args:
        line: Its timeline.
        together, last_arrival: When both were last together, and when it arrived (ns), by wait.
        own_states: Time of the waiting rank in each state in between (ns): (waits, states).

    Returns:
        Shares of the excess by state, of the same shape: each row adds up to 1. Without an excess,
        the state in which the rank arrived has all.
    """
    states = line.cumulative_by_state(last_arrival) - line.cumulative_by_state(together)
    excess = np.clip(states - own_states, 0, None)
    excess_sum = excess.sum(axis=1, keepdims=True)
    arrived_in = np.eye(len(STATES))[line.underlying_at(last_arrival - 1)]
    return np.where(excess_sum > 0, excess / np.maximum(excess_sum, 1), arrived_in)


def attributed_waits(
    matched: MatchedCommunication, blocked: BlockedTime, within: Window, residual: int
) -> npt.NDArray[np.bool_]:
    """Return which waits are attributed to a rank: exposed, and longer than the residual."""
    rows = matched.waits
    start = np.maximum(rows["start"], within.start)
    length = np.minimum(np.minimum(rows["latest"], rows["end"]), within.end) - start
    attributed = (rows["culprit"] != NO_INDEX) & (length > residual) & (blocked.wait > 0)
    return np.asarray(attributed)


def rows_by_value(values: Ints) -> Iterable[tuple[int, Ints]]:
    """Return each distinct value with the indices of its rows."""
    order = np.argsort(values, kind="stable")
    unique, first = np.unique(values[order], return_index=True)
    return zip(unique.tolist(), np.split(order, first[1:]), strict=False)


def last_together(rows: npt.NDArray[Any]) -> Ints:
    """Return for each wait when its rank was last together with its group (ns).

    That is the end of the last wait before the rank went to work again. Consecutive waits without
    work between them (the buckets of one backward) count as one. For the first wait it is the int64
    minimum.
    """
    order = np.lexsort((rows["end"], rows["group"], rows["record"]))
    start, end = rows["start"][order], rows["end"][order]
    same = np.ones(len(rows), bool)
    for name in ("record", "group"):
        same[1:] &= rows[name][order][1:] == rows[name][order][:-1]
    before = np.concatenate(([np.iinfo(np.int64).min], end[:-1])) if len(rows) else end
    begins = ~same | (start - before > MAX_GAP_NS)
    begins[:1] = True
    first = np.maximum.accumulate(np.where(begins, np.arange(len(rows)), 0))
    result = np.empty(len(rows), np.int64)
    result[order] = np.where(same[first], before[first], np.iinfo(np.int64).min)
    return result


def transfer_losses(
    matched: MatchedCommunication, blocked: BlockedTime, ranks: int, place: LossPlaces
) -> list[Loss]:
    """Return the exposed time after the last member arrived, by group and collective."""
    rows, length, edges = matched.waits, blocked.transfer, place.ranges.edges
    start = np.clip(np.clip(rows["latest"], rows["start"], rows["end"]), edges[0], edges[-1])
    ranks_ns = ranks * int(edges[-1] - edges[0])
    result = []
    nonzero = np.flatnonzero(length > 0)
    kind = rows["group"][nonzero].astype(np.int64) << 8 | rows["op"][nonzero]
    for kind_key, rows_of_kind in rows_by_value(kind):
        group, op, rows_of_loss = kind_key >> 8, kind_key & 0xFF, nonzero[rows_of_kind]
        weights = length[rows_of_loss].astype(np.float64)
        share = float(weights.sum()) / ranks_ns
        where = (rows_of_loss, start[rows_of_loss], weights, share, "transfer")
        result.append(
            Loss(
                "transfer",
                share,
                group=matched.groups[group],
                collective=collective_name(op),
                **place.of_waits(*where),
            )
        )
    return result


def own_losses(records: list[Record], timelines: list[Timeline], place: LossPlaces) -> list[Loss]:
    """Return the losses of the ranks outside communication: LOSSES."""
    edges, steps = place.ranges.edges, place.steps
    length = int(edges[-1] - edges[0])
    per_range = np.empty((len(timelines), len(edges) - 1, len(STATES)))  # (ranks, ranges, states)
    by_step = np.zeros((len(steps) + 1, len(STATES))) if steps is not None else None
    for i, line in enumerate(timelines):
        times = edges if steps is None else np.concatenate([edges, steps.bounds[i], edges[-1:]])
        cumulative = line.cumulative_by_state(times)
        per_range[i] = np.diff(cumulative[: len(edges)], axis=0)
        if by_step is not None:
            by_step += np.diff(cumulative[len(edges) :], axis=0)
    result = []
    for kind in LOSSES:
        state = STATES.index(kind)
        spent = per_range[:, :, state]
        if not spent.any():
            continue
        by_rank = spent.sum(axis=1)
        worst, share = int(by_rank.argmax()), float(by_rank.mean()) / length
        in_steps = by_step[:, state] if by_step is not None else None
        result.append(
            Loss(
                kind,
                share,
                records[worst].rank,
                records[worst].host,
                mostly_starved_in(timelines) if kind == "starved" else None,
                **place.of_states(spent.sum(axis=0), in_steps, share, kind),
                most=float(by_rank[worst]) / length,
                lines=lines_in(records, timelines, state),
            )
        )
    return result


def lines_in(
    records: Iterable[Record], timelines: Iterable[Timeline], state: int = OTHER
) -> list[dict[str, object]]:
    """Return the script's lines in which its ranks were in ``state``, the longest first.

    Each has file, line, function, code, inside (module.function of the library that it called, if
    any), and its share of the time in ``state``. A sample stands for the time in ``state`` since
    the sample before it: after a standstill, in which the sampler could not run, for all of that.
    The position of a wait for a core is unknown, so it is of any sample that ends it.
    """
    found: dict[tuple[str, ...], tuple[int, dict[str, object]]] = {}
    for record, line in zip(records, timelines, strict=True):
        samples = record.events_in(State.SAMPLE)
        inside = (samples["start"] >= line.edges[0]) & (samples["start"] < line.edges[-1])
        samples = samples[inside]
        samples = samples[np.argsort(samples["start"], kind="stable")]
        time = np.diff(line.cumulative_in(STATES[state], samples["start"]), prepend=0)
        in_state = line.underlying_at(samples["start"]) == state
        in_state = time > 0 if STATES[state] == "starved" else in_state
        rows = zip(samples["amount"][in_state].tolist(), time[in_state].tolist(), strict=True)
        for number, spent in rows:
            known = record.lines.get(number)
            if known is not None:
                place = tuple(str(known.get(name)) for name in ("file", "line", "inside"))
                found[place] = (found.get(place, (0, {}))[0] + max(spent, 1), known)
    total = sum(time for time, _ in found.values())
    best = sorted(found.values(), key=lambda both: -both[0])[:5]
    return [{**script_line(known), "share": time / total} for time, known in best]


def script_line(known: dict[str, Any]) -> dict[str, object]:
    """Return the fields of a sampled line that a report has."""
    return {name: known.get(name) for name in ("file", "line", "function", "inside", "code")}


def collective_name(op: int) -> str:
    """Return the name of a collective as in the report: all-reduce, broadcast, ..."""
    return Op(op).name.lower().replace("_", "-") if op in set(Op) else f"operation {op}"


def _sum_by_range(times: Ints, weights: Floats, ranges: StepRanges) -> np.ndarray:
    range_index = np.clip(
        np.searchsorted(ranges.edges, times, "right") - 1, 0, len(ranges.edges) - 2
    )
    return np.bincount(range_index, weights, minlength=len(ranges.edges) - 1)


def _largest_kind(group: Ints, op: Ints, weights: npt.NDArray[np.float64]) -> tuple[int, int]:
    """Return the group and the collective with the largest sum of weights."""
    key = group.astype(np.int64) << 8 | op
    kinds, at = np.unique(key, return_inverse=True)
    best = int(kinds[np.bincount(at, weights).argmax()])
    return best >> 8, best & 0xFF


def losses_add_up(losses: list[Loss], e: Efficiencies) -> bool:
    """Return whether the losses add up to what is not useful."""
    return abs(sum(loss.share for loss in losses) - (1 - e.useful)) < 1e-6
