"""Find the steps of the window, and which of them have a loss: all, every 30th, a range."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...record.ring.states import State
from ..records.read_record import Record
from ..records.state_timeline import Ints, Window

Floats = npt.NDArray[np.float64]
MAX_LOST_STEPS = 1 << 16  # steps without an event on any rank; each takes a column of memory
MAX_LISTED_STEPS = 16  # of one loss
_MIN_SHARE = 0.7  # of a loss, in the steps that decide what a step with the loss has at least
_MIN_LEVEL = 0.25  # of the smallest of these; a step with less does not have the loss
_LOADER_START_EVENTS = 2  # waits for input more than usual: the end of a pass, the next iterator
_MIN_INEXACT_PERIOD = 10  # from which on an interval may differ by one step


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

    def index_of(self, record: int, times: Ints) -> Ints:
        """Return the index of the step at each time of a record; ``len(self)`` after the last."""
        index = np.searchsorted(self.bounds[record], times, "right") - 1
        return np.asarray(np.clip(index, 0, len(self)), np.int64)


def steps_in_window(records: list[Record], within: Window) -> Steps | None:
    """Return the window's steps, or None where the ranks have none in common."""
    rows = [record.events_in(State.STEP)[["step", "end"]] for record in records]
    rows = [row[(row["end"] >= within.start) & (row["end"] <= within.end)] for row in rows]
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
    bounds = np.full((len(rows), last - first + 2), within.start, np.int64)
    for i, row in enumerate(rows):
        inside = row[(row["step"] >= first) & (row["step"] <= last)]
        bounds[i, inside["step"].astype(np.int64) - first + 1] = inside["end"]
    np.maximum.accumulate(bounds, axis=1, out=bounds)  # a step whose event was lost has no time
    if int(bounds[:, 1].max()) == within.start:  # the step that the window begins with
        bounds, first = bounds[:, 1:], first + 1
    if bounds.shape[1] < 2:
        return None
    ends = bounds.max(axis=0)
    return Steps(first, bounds, np.diff(ends) / 1e9)


@dataclass(frozen=True)
class Occurrence:
    """The steps that have a loss.

    Attributes:
        count: Number of these steps; ``of``: of all steps in the window, which ends with step
            ``last_of_all``. What follows it counts as one more step.
        share: Of the loss, in these steps.
        first, last: Numbers of the first and the last of them.
        period: Steps between two occurrences, where at least three are equally far apart.
        exact: Whether they are exactly that far apart; else by one step more or less.
        at_epoch_ends: Whether a loader begins a new pass in each of them.
        steps: Their numbers, ``MAX_LISTED_STEPS`` at most.
    """

    count: int
    of: int
    last_of_all: int
    share: float
    first: int
    last: int
    period: int | None = None
    exact: bool = True
    at_epoch_ends: bool = False
    steps: list[int] = field(default_factory=list)


def occurrence(weights: Floats, steps: Steps, loader_starts: Ints | None = None) -> Occurrence:
    """Return the steps that have most of a loss.

    weights: The loss in each step, and after the last one: (steps + 1,), not all 0.
    loader_starts: Indices of the steps in which a loader begins a new pass, if that may be a cause.
    """
    largest = np.sort(weights)[::-1]
    enough = np.searchsorted(np.cumsum(largest), _MIN_SHARE * largest.sum())
    level = _MIN_LEVEL * largest[min(int(enough), len(largest) - 1)]
    at = np.flatnonzero((weights >= level) & (weights > 0))
    period, exact = _period(at)
    last_of_all = steps.first + len(steps) - 1
    in_steps = at[at < len(steps)]  # after the last step, no pass begins
    at_epoch_ends = False
    if loader_starts is not None and len(in_steps):
        at_epoch_ends = bool(np.isin(in_steps, loader_starts).all())
    return Occurrence(
        count=len(at),
        of=len(steps) + bool(weights[-1] > 0 and at[-1] == len(steps)),
        last_of_all=last_of_all,
        share=float(weights[at].sum() / weights.sum()),
        first=steps.first + int(at[0]),
        last=steps.first + int(at[-1]),
        period=period,
        exact=exact,
        at_epoch_ends=at_epoch_ends and len(at) < len(steps) / 2,
        steps=(steps.first + at[:MAX_LISTED_STEPS]).tolist(),
    )


def _period(at: Ints) -> tuple[int | None, bool]:
    """Return the period of steps, of which neighbours count as one, and whether it is exact."""
    starts = at[np.diff(at, prepend=at[0] - 2) > 1]
    gaps = np.diff(starts)
    if len(gaps) < 2 or len(at) > 2 * len(starts):
        return None, True
    period = int(np.median(gaps))
    if (gaps == period).all():
        return period, True
    near = (np.abs(gaps - period) <= 1).all() and period >= _MIN_INEXACT_PERIOD
    return (period if near else None), False


def loader_starts(records: list[Record], steps: Steps) -> Ints:
    """Return the indices of the steps in which most ranks' loaders begin a new pass.

    The end of a pass, and the next iterator, are recorded as waits for input besides the usual ones
    of a step. Those of a validation are not counted.
    """
    counts = _input_waits(records, steps)
    usual = np.median(counts[:, :-1], axis=1, keepdims=True)
    votes = (counts >= usual + _LOADER_START_EVENTS).sum(axis=0)
    return np.flatnonzero(votes * 2 > len(records))


def batches_per_step(records: list[Record], steps: Steps) -> int:
    """Return the median number of batches that a rank's loaders give in a step, at least 1."""
    return max(int(np.median(_input_waits(records, steps)[:, :-1])), 1)


def _input_waits(records: list[Record], steps: Steps) -> Ints:
    """Return the number of waits for input, except those of a validation.

    By rank and step; the last column is of the time after the last step.
    """
    counts = []
    for i, record in enumerate(records):
        waits, validation = record.events_in(State.INPUT), record.events_in(State.VALIDATION)
        if len(validation):
            validation = validation[np.argsort(validation["start"], kind="stable")]
            end = np.maximum.accumulate(validation["end"])
            at = np.searchsorted(validation["start"], waits["start"], "right") - 1
            waits = waits[(at < 0) | (waits["start"] >= end[at])]
        inside = waits["start"] >= steps.bounds[i, 0]
        at = steps.index_of(i, waits["start"][inside])
        counts.append(np.bincount(at, minlength=len(steps) + 1))
    return np.array(counts)
