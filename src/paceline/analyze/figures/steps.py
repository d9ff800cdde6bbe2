"""How long the steps took, which of them stand out, and what was longer in those.

A job's step ends when its last rank's does; a validation or a save between two steps belongs to
the later one. What a rank did more in a step than in its median step explains an outlier.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...record.ring.states import State
from ..records.state_timeline import COMMUNICATION, STATES, Ints
from .measured_window import Measured

Floats = npt.NDArray[np.float64]
_MADS = 5.0  # an outlier is so many (scaled) median deviations above the median ...
_LEAST = 1.5  # ... and at least so many times the median
_EXPLAINS = 0.5  # of the time that a step took longer: less than that is no explanation
_ALIKE = 0.5  # of the largest excess: a rank with that much has it too
MAX_LOST_STEPS = 1 << 16  # without an event on any rank; each takes a column of the steps' table
MOST = 1000  # outliers that are told one by one
_SCALE = 1.4826  # of the median deviation, to a normal distribution's standard deviation


@dataclass(frozen=True)
class Outlier:
    """A step that took longer than others. state: what ranks spent the time in, None where no
    state explains it ("still" and "stalled": see trouble.py); rank: whose that was, None for most
    of them; longer_s: by how much."""

    step: int
    seconds: float
    state: str | None
    rank: int | None
    longer_s: float


@dataclass(frozen=True)
class StepTimes:
    """Times of the job's steps in seconds; typical (the one nearest to the median), best and
    worst are numbers of steps. Outliers in the order of steps: those above the median by 5 scaled
    median absolute deviations, and by half of it; the ``MOST`` longest of ``outlier_count``."""

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
    """The steps that all ranks have done in the window. bounds[r, s] to bounds[r, s + 1] is step
    ``first + s`` of the r-th record; seconds[s] its time for the job."""

    first: int
    bounds: Ints
    seconds: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    def span(self, step: int) -> tuple[int, int]:
        """From the first rank's start of a step to the last one's end (ns)."""
        at = step - self.first
        return int(self.bounds[:, at].min()), int(self.bounds[:, at + 1].max())


def steps_of(m: Measured) -> Steps | None:
    """The window's steps; None where ranks have none in common."""
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


def spent(m: Measured, steps: Steps, rank: int) -> Ints:
    """Nanoseconds of one record in each state, in each step: (steps, states)."""
    return np.diff(m.timelines[rank].cumulative_by_state(steps.bounds[rank]), axis=0)


def step_times(m: Measured, steps: Steps) -> StepTimes:
    """The steps' times, and what made the outliers longer."""
    seconds = steps.seconds
    middle = float(np.median(seconds))
    deviation = _SCALE * float(np.median(np.abs(seconds - middle)))
    out = np.flatnonzero(seconds > max(middle + _MADS * deviation, _LEAST * middle))
    told = np.sort(out[np.argsort(-seconds[out], kind="stable")][:MOST])
    return StepTimes(
        first=steps.first,
        last=steps.first + len(steps) - 1,
        median_s=middle,
        p5_s=float(np.percentile(seconds, 5)),
        p95_s=float(np.percentile(seconds, 95)),
        typical=steps.first + int(np.abs(seconds - middle).argmin()),
        best=steps.first + int(seconds.argmin()),
        worst=steps.first + int(seconds.argmax()),
        outlier_count=len(out),
        outliers=_explained(m, steps, told, middle) if len(told) else [],
    )


def _explained(m: Measured, steps: Steps, which: Ints, middle: float) -> list[Outlier]:
    longer = np.empty((len(m.records), len(which), len(STATES)))
    for i in range(len(m.records)):
        times = spent(m, steps, i)
        longer[i] = (times[which] - np.median(times, axis=0)) / 1e9
    result = []
    for at, step in enumerate(which.tolist()):
        seconds = float(steps.seconds[step])
        state, rank, excess = _cause(longer[:, at], seconds - middle)
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


def _cause(longer: Floats, excess: float) -> tuple[str | None, int | None, float]:
    """The state, the record's number and the seconds that explain a step. What a rank did itself
    comes before what it waited for."""
    own = longer.copy()
    own[:, list(COMMUNICATION)] = 0.0
    rank, state = np.unravel_index(int(own.argmax()), own.shape)
    if own[rank, state] >= _EXPLAINS * excess:
        alike = own[:, state] >= _ALIKE * own[rank, state]
        several = len(own) > 1 and alike.mean() > 0.5
        return STATES[state], None if several else int(rank), float(own[rank, state])
    exchange = float(np.median(longer[:, COMMUNICATION[1]]))
    if exchange >= _EXPLAINS * excess:
        return STATES[COMMUNICATION[1]], None, exchange
    return None, None, excess
