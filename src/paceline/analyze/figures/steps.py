"""Measure the job's steps: how long they took, which are outliers, and why.

A step of the job ends when the last rank ends it; a validation or a checkpoint between two steps
belongs to the later one. An outlier is explained by the state in which a rank spent more time than
in its median step.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...record.ring.states import State
from ..records.state_timeline import COMMUNICATION, STATES, Ints
from .measured_window import MeasuredWindow

Floats = npt.NDArray[np.float64]
_OUTLIER_MADS = 5.0  # an outlier exceeds the median by this many scaled deviations, and
_OUTLIER_MIN_RATIO = 1.5  # is at least this many times the median
_MIN_EXPLAINED = 0.5  # of a step's excess time, for a cause to be named
_MIN_SIMILAR_EXCESS = 0.5  # of the largest excess: then another rank has it too
MAX_LOST_STEPS = 1 << 16  # steps without an event on any rank; each takes a column of memory
MAX_LISTED_OUTLIERS = 1000
_MAD_SCALE = 1.4826  # from the MAD to a normal distribution's standard deviation


@dataclass(frozen=True)
class Outlier:
    """A step that took longer than others.

    Attributes:
        state: The state that explains it, or "still" or "stalled" (see stalls.py). None: no
            explanation.
        rank: The rank in that state; None where it was most of them.
        longer_s: Seconds of the step that the cause explains.
    """

    step: int
    seconds: float
    state: str | None
    rank: int | None
    longer_s: float


@dataclass(frozen=True)
class StepTimes:
    """Times of the job's steps.

    Attributes:
        typical: Number of the step whose time is nearest to the median.
        best: Number of the shortest step.
        worst: Number of the longest step.
        outlier_count: Steps above the median by 5 scaled median absolute deviations, and by half of
            it.
        outliers: The ``MAX_LISTED_OUTLIERS`` longest of them, in the order of steps.
    """

    first: int
    last: int
    median_s: float
    p5_s: float
    p95_s: float
    typical: int
    best: int
    worst: int
    outlier_count: int
    outliers: list[Outlier] = field(default_factory=list)


@dataclass(frozen=True)
class Steps:
    """The steps that all ranks completed in the window.

    Attributes:
        first: Number of the first step.
        bounds: (records, steps + 1), ns: bounds[r, s] to bounds[r, s + 1] is step ``first + s``.
        seconds: Duration of each step for the job.
    """

    first: int
    bounds: Ints
    seconds: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    def span(self, step: int) -> tuple[int, int]:
        """Return the first rank's start and the last rank's end of a step (ns)."""
        at = step - self.first
        return int(self.bounds[:, at].min()), int(self.bounds[:, at + 1].max())


def find_steps(m: MeasuredWindow) -> Steps | None:
    """Return the window's steps, or None where the ranks have none in common."""
    rows = [record.events_in(State.STEP)[["step", "end"]] for record in m.records]
    rows = [row[(row["end"] >= m.within.start) & (row["end"] <= m.within.end)] for row in rows]
    if not all(len(row) for row in rows):
        return None
    # The window begins at the end of a step: one rank's is at its start, the others' before.
    first = max(int(row["step"].min()) for row in rows)
    last = min(int(row["step"].max()) for row in rows)
    if last < first:
        return None
    numbers = np.unique(np.concatenate([row["step"] for row in rows]))
    done = int(np.count_nonzero((numbers >= first) & (numbers <= last)))
    if last - first + 1 > done + MAX_LOST_STEPS:
        return None
    bounds = np.full((len(rows), last - first + 2), m.within.start, np.int64)
    for i, row in enumerate(rows):
        inside = row[(row["step"] >= first) & (row["step"] <= last)]
        bounds[i, inside["step"].astype(np.int64) - first + 1] = inside["end"]
    np.maximum.accumulate(bounds, axis=1, out=bounds)  # a step whose event was lost has no time
    if int(bounds[:, 1].max()) == m.within.start:  # the step that the window begins with
        bounds, first = bounds[:, 1:], first + 1
    if bounds.shape[1] < 2:
        return None
    ends = bounds.max(axis=0)
    return Steps(first, bounds, np.diff(ends) / 1e9)


def states_by_step(m: MeasuredWindow, steps: Steps, rank: int) -> Ints:
    """Return nanoseconds of one record in each state, in each step: (steps, states)."""
    return np.diff(m.timelines[rank].cumulative_by_state(steps.bounds[rank]), axis=0)


def measure_steps(m: MeasuredWindow, steps: Steps) -> StepTimes:
    """Return the distribution of the steps' times, and the cause of each outlier."""
    seconds = steps.seconds
    median = float(np.median(seconds))
    deviation = _MAD_SCALE * float(np.median(np.abs(seconds - median)))
    outliers = np.flatnonzero(
        seconds > max(median + _OUTLIER_MADS * deviation, _OUTLIER_MIN_RATIO * median)
    )
    listed = np.sort(outliers[np.argsort(-seconds[outliers], kind="stable")][:MAX_LISTED_OUTLIERS])
    return StepTimes(
        first=steps.first,
        last=steps.first + len(steps) - 1,
        median_s=median,
        p5_s=float(np.percentile(seconds, 5)),
        p95_s=float(np.percentile(seconds, 95)),
        typical=steps.first + int(np.abs(seconds - median).argmin()),
        best=steps.first + int(seconds.argmin()),
        worst=steps.first + int(seconds.argmax()),
        outlier_count=len(outliers),
        outliers=_explain_outliers(m, steps, listed, median) if len(listed) else [],
    )


def _explain_outliers(
    m: MeasuredWindow, steps: Steps, outliers: Ints, median: float
) -> list[Outlier]:
    longer = np.empty((len(m.records), len(outliers), len(STATES)))
    for i in range(len(m.records)):
        times = states_by_step(m, steps, i)
        longer[i] = (times[outliers] - np.median(times, axis=0)) / 1e9
    result = []
    for at, step in enumerate(outliers.tolist()):
        seconds = float(steps.seconds[step])
        state, rank, excess = _find_cause(longer[:, at], seconds - median)
        result.append(
            Outlier(
                steps.first + step,
                seconds,
                state,
                m.records[rank].rank if rank is not None else None,
                excess,
            )
        )
    return result


def _find_cause(longer: Floats, excess: float) -> tuple[str | None, int | None, float]:
    """Return the state, the index of the record and the seconds that explain a step.

    A rank's own states come before its waiting, whose cause is another rank.
    """
    own = longer.copy()
    own[:, list(COMMUNICATION)] = 0.0
    rank, state = np.unravel_index(int(own.argmax()), own.shape)
    if own[rank, state] >= _MIN_EXPLAINED * excess:
        similar = own[:, state] >= _MIN_SIMILAR_EXCESS * own[rank, state]
        is_majority = len(own) > 1 and similar.mean() > 0.5
        return STATES[state], None if is_majority else int(rank), float(own[rank, state])
    transfer_s = float(np.median(longer[:, COMMUNICATION[1]]))
    if transfer_s >= _MIN_EXPLAINED * excess:
        return STATES[COMMUNICATION[1]], None, transfer_s
    return None, None, excess
