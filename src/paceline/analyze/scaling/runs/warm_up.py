"""Find the first steady step of a run: the marginal standard error rule.

The first steps of a training are not like the later ones: memory is allocated, caches fill,
batches that were loaded ahead are used up. The rule drops as many steps as make the standard error
of the mean of the remaining ones smallest (MSER; White, "An effective truncation heuristic for bias
reduction in simulation output", Simulation 69, 1997). At most half of the steps are dropped: where
the smallest error lies there, the run has no steady part that is long enough.

A step far above the others (a validation, a checkpoint) may lie anywhere, and says nothing of the
warm-up. For the rule, and only for it, steps count as at most ``MAX_RATIO`` times the median.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_RATIO = 2.0  # of the later half's median
MIN_STEPS = 6  # with fewer, nothing is dropped, and it is not known whether the run is steady


@dataclass(frozen=True)
class WarmUp:
    """Steps to drop at the beginning, and whether the rest is steady."""

    steps: int
    steady: bool


def find_warm_up(seconds: Sequence[float]) -> WarmUp:
    """Return the number of steps to drop of a run with steps of these durations."""
    count = len(seconds)
    if count < MIN_STEPS:
        return WarmUp(0, steady=False)
    times = np.asarray(seconds, np.float64)
    times = np.minimum(times, MAX_RATIO * np.median(times[count // 2 :]))
    # Sums of the remaining steps, for each number of dropped ones.
    left = np.arange(count, 0, -1)
    sums = np.cumsum(times[::-1])[::-1]
    squares = np.cumsum((times**2)[::-1])[::-1]
    errors = np.maximum(squares - sums**2 / left, 0.0) / left.astype(np.float64) ** 2
    most = count // 2
    dropped = int(errors[: most + 1].argmin())
    return WarmUp(dropped, steady=dropped < most)
