"""Measure the job's steps: how long they took, which are outliers, and why.

A step of the job ends when the last rank ends it; a validation or a checkpoint between two steps
belongs to the later one. An outlier is explained by the state in which a rank spent more time than
in its median step.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from ..records.state_timeline import BUBBLE, COMMUNICATION, STATES, Ints
from .measured_window import MeasuredWindow
from .window_steps import Floats, Steps

_OUTLIER_MADS = 5.0  # an outlier exceeds the median by this many scaled deviations, and
_OUTLIER_MIN_RATIO = 1.5  # is at least this many times the median
_MIN_EXPLAINED = 0.5  # of a step's excess time, for a cause to be named
_MIN_SIMILAR_EXCESS = 0.5  # of the largest excess: then another rank has it too
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


def states_by_step(m: MeasuredWindow, steps: Steps, rank: int) -> Ints:
    """Return nanoseconds of one record in each state, in each step: (steps, states)."""
    return np.diff(m.timelines[rank].cumulative_by_state(steps.bounds[rank]), axis=0)


def times_by_range(m: MeasuredWindow, names: Collection[str]) -> Floats:
    """Return the seconds per step of these states, in each range of steps: (ranks, ranges)."""
    edges, counts = m.ranges.edges, np.diff(m.ranges.steps)
    columns = [STATES.index(name) for name in names]
    spent = [
        np.diff(line.cumulative_by_state(edges), axis=0)[:, columns].sum(axis=1)
        for line in m.timelines
    ]
    inside = (np.diff(edges) > 0) & (counts > 0)
    return np.array(spent)[:, inside] / counts[inside] / 1e9


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
    own[:, BUBBLE:] = 0.0
    rank, state = np.unravel_index(int(own.argmax()), own.shape)
    if own[rank, state] >= _MIN_EXPLAINED * excess:
        similar = own[:, state] >= _MIN_SIMILAR_EXCESS * own[rank, state]
        is_majority = len(own) > 1 and similar.mean() > 0.5
        return STATES[state], None if is_majority else int(rank), float(own[rank, state])
    transfer_s = float(np.median(longer[:, COMMUNICATION[1]]))
    if transfer_s >= _MIN_EXPLAINED * excess:
        return STATES[COMMUNICATION[1]], None, transfer_s
    return None, None, excess
