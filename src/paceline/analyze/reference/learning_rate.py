"""Compare the learning rate of a run with that of its reference.

Schedules may depend on the loss, so that a rate falls earlier or later than in the reference. A
rate that rises where no run of the reference rises is an event that the loss may show only later.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from .band import MIN_TIME_TOLERANCE, TIME_TOLERANCE
from .series import Reference

MIN_RISE = 3.0  # from one step to the next
MIN_REFERENCE_RISE = 1.5  # of the reference's smallest to its largest rate around there


@dataclass(frozen=True)
class RateRise:
    """The learning rate rose at ``step``, from ``old`` to ``new``."""

    step: int
    old: float
    new: float


@dataclass
class RateWatch:
    """The learning rate of one run. ``rise`` stays once it was found."""

    reference: Reference
    rise: RateRise | None = None
    _last: float = field(default=math.nan)

    def add(self, step: int, samples: float, rate: float) -> RateRise | None:
        """Add the rate of a step; return a rise that the reference does not have."""
        last, self._last = self._last, rate
        if self.rise is not None or not (last > 0 and math.isfinite(rate)):
            return None
        if rate < MIN_RISE * last:
            return None
        x = samples if self.reference.axis == "samples" else step
        if self._rises_in_reference(x):
            return None
        self.rise = RateRise(step, last, rate)
        return self.rise

    def _rises_in_reference(self, x: float) -> bool:
        """Return whether a run of the reference rises around ``x``, or its rate is not known."""
        for run in self.reference.runs:
            at = run.along(self.reference.axis)
            shift = max(TIME_TOLERANCE * x, MIN_TIME_TOLERANCE * float(at[-1] - at[0]))
            rates = run.rates[(at >= x - shift) & (at <= x + shift)]
            rates = rates[np.isfinite(rates)]
            if not len(rates):
                return True
            lowest = np.minimum.accumulate(rates)
            if bool(np.any(rates > MIN_REFERENCE_RISE * lowest)):
                return True
        return False
