"""A sequential test for a change of the mean, with a bounded rate of false alarms.

Standardized residuals z of a healthy run have means within a tolerance; a fault that sets in at an
unknown value moves the mean up or down. For each rate L of ``TILTS`` and each direction, the
likelihood ratio of a value is exp(L z - psi(L)), where psi bounds the log moment-generating
function of sums of healthy residuals. The products over the values since each possible start,
averaged over starts, rates and directions (Robbins' method of mixtures; over starts it is the
recursion of Shiryaev and Roberts), are a supermartingale of a healthy run that begins at 1. By
Ville's inequality it exceeds 1 / a with a probability of at most a, however long one looks.

psi is measured from the residuals of the reference runs, as the largest over sums of 1, 2, 4 ...
values. So it contains their skewness and their autocorrelation.

H. Robbins, Ann. Math. Stat. 41 (1970) 1397; J. Shin, A. Ramdas, A. Rinaldo, E-detectors, arXiv
2203.03532.
"""

from dataclasses import dataclass

import numpy as np

from .series import Floats

TILTS = (0.25, 0.5, 1.0, 1.5)
FALSE_ALARM_RATE = 0.01  # of a healthy run of the reference's length
MAX_Z = 4.0  # larger residuals count as this much: one value is no evidence of a change
MAX_SUM = 64  # values in the longest sums from which psi is measured
VARIANCE_MARGIN = 1.15  # psi is at least that of a normal distribution with this variance
MIN_SUMS = 8  # sums of a length, to measure psi from them


@dataclass(frozen=True)
class Alarm:
    """The test has detected a change.

    Attributes:
        start: Number of the value at which the change most likely set in.
        direction: 1 for larger values than healthy ones, -1 for smaller.
    """

    start: int
    direction: int


def measure_psi(residuals: list[Floats]) -> Floats:
    """Return psi for each of TILTS and the directions 1 and -1, as (directions, tilts).

    Args:
        residuals: Standardized residuals of each healthy run.
    """
    tilts = np.array(TILTS)
    psi = np.tile(VARIANCE_MARGIN * tilts**2 / 2, (2, 1))
    clipped = [np.clip(one, -MAX_Z, MAX_Z) for one in residuals if len(one)]
    length = 1
    while length <= MAX_SUM:
        parts = [series[: len(series) // length * length].reshape(-1, length) for series in clipped]
        sums = np.concatenate([part.sum(axis=1) for part in parts]) if parts else np.empty(0)
        if len(sums) < MIN_SUMS:
            break
        for i, direction in enumerate((1, -1)):
            exponents = np.outer(tilts, direction * sums)
            top = exponents.max(axis=1)
            mean = np.log(np.mean(np.exp(exponents - top[:, None]), axis=1)) + top
            psi[i] = np.maximum(psi[i], mean / length)
        length *= 2
    return psi


class SequentialTest:
    """The test of one run.

    Args:
        psi: Result of ``measure_psi``.
        values: Number of values for which the rate of false alarms holds.
    """

    def __init__(self, psi: Floats, values: int) -> None:
        self._psi, self._tilts = psi, np.array(TILTS)
        self._start_weight = 1.0 / max(values, 1)
        self._log_limit = float(np.log(2 * len(TILTS) / FALSE_ALARM_RATE))
        shape = psi.shape
        self._log_ratio = np.full(shape, -np.inf)  # of the mixture over starts
        self._cusum = np.zeros(shape)
        self._start = np.zeros(shape, np.int64)
        self.count = 0

    def add(self, up: float, down: float) -> Alarm | None:
        """Add a value; return an alarm as long as the limit is exceeded.

        Args:
            up: The residual above the tolerance, standardized. Negative below it.
            down: The residual below the tolerance, with its sign changed.
        """
        z = np.minimum(np.array([[up], [down]]), MAX_Z)
        z = np.maximum(z, -MAX_Z)
        gain = self._tilts * z - self._psi
        self._log_ratio = np.logaddexp(self._log_ratio, np.log(self._start_weight)) + gain
        restarts = self._cusum <= 0
        self._start = np.where(restarts, self.count, self._start)
        self._cusum = np.maximum(self._cusum, 0) + gain
        self.count += 1
        total = float(np.logaddexp.reduce(self._log_ratio, axis=None))
        if total < self._log_limit:
            return None
        row, column = np.unravel_index(int(self._log_ratio.argmax()), self._log_ratio.shape)
        return Alarm(int(self._start[row, column]), 1 if row == 0 else -1)

    def forget(self) -> None:
        """Discard the evidence so far, of a deviation that has recovered."""
        self._log_ratio[:] = -np.inf
        self._cusum[:] = 0
