"""Hold the values of one run against the band of a reference, value by value.

A run may be offset from the reference by as much as healthy runs differ. The offset is learned from
its older values, so that a change of it stands out. A deviation counts if it lasts: a spike that
recovers within ``persistence`` values is no alarm.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from .band import Band, make_band
from .metric import Metric
from .sequential import MAX_Z, Alarm, SequentialTest, measure_psi
from .series import Floats, Reference, Series

MIN_PERSISTENCE = 8  # values
PERSISTENCE = 0.005  # of the values of the reference
FIRST_VALUES = 10  # the noise of the run is not known yet
LAG = 0.02  # of the values of the reference: values that are too recent to learn the offset from
MEMORY = 0.1  # of the values of the reference: over which the offset is averaged
LEARNED = 1 / 3  # of MEMORY: number of values from which the offset is known
MAX_NOISE_RATIO = 3.0  # of a run: one that prints the loss of a rank's part is noisier
RATIO_INTERVAL = 8  # values between two updates of that ratio
TOLERANCE = 0.25  # of the noise
TOLERANCE_ALONE = 1.0  # the same with a single reference run, whose drift can't be measured
MAX_NONFINITE = 3  # values that are not finite, one after the other


@dataclass(frozen=True)
class Divergence:
    """A run has left the band.

    Attributes:
        kind: "high", "low" or "nonfinite".
        start: Number of the value at which it left.
        found: Number of the value at which that was certain.
        value, expected: Mean of the run's values and of the reference since ``start``.
    """

    kind: str
    start: int
    found: int
    value: float
    expected: float


@dataclass(frozen=True)
class Standard:
    """What runs are held against: the band of a reference, and the test for its residuals."""

    band: Band
    psi: Floats
    axis: str
    metric: Metric
    reference_step: float  # median absolute difference of consecutive values, standardized

    @property
    def persistence(self) -> int:
        return max(MIN_PERSISTENCE, round(PERSISTENCE * self.band.values))


def make_standard(reference: Reference) -> Standard:
    """Measure the band of a reference, and how far its own runs stray within it.

    Each run is held against the band of the others. With a single run, its values are held against
    its own curve.

    Raises:
        ValueError: A run has too few values, or values that are not finite.
    """
    band = make_band(reference)
    runs = reference.distinct_runs
    steps = [_differences(run, band, reference.axis) for run in runs]
    typical = float(np.median(np.concatenate(steps)))
    unused = measure_psi([])
    residuals = []
    for number, run in enumerate(runs):
        others = [*runs[:number], *runs[number + 1 :]] or runs
        held = make_band(Reference(reference.metric, others))
        standard = Standard(held, unused, reference.axis, reference.metric, typical)
        guard = RunGuard(standard)
        points = zip(run.along(reference.axis).tolist(), run.values.tolist(), strict=True)
        found = [guard.residual(x, y) for x, y in points]
        centered = [one.centered for one in found if one is not None and one.centered is not None]
        residuals.append(np.array(centered))
    return Standard(band, measure_psi(residuals), reference.axis, reference.metric, typical)


def _differences(run: Series, band: Band, axis: str) -> Floats:
    noise = np.interp(run.along(axis), band.x, band.noise)
    return np.asarray(np.abs(np.diff(run.values)) / noise[1:])


@dataclass(frozen=True)
class Residual:
    """A value's deviation from the reference, standardized.

    Attributes:
        centered: From the curve and the run's offset; None where the curve falls fast, or the
            offset is not known yet.
        up, down: Beyond the tolerance above and below; negative within it.
    """

    centered: float | None
    up: float
    down: float


class RunGuard:
    """The values of one run, held against a standard."""

    def __init__(self, standard: Standard) -> None:
        self.standard, band = standard, standard.band
        self.persistence = standard.persistence
        self._test = SequentialTest(standard.psi, band.values)
        self._tolerance = TOLERANCE if band.runs > 1 else TOLERANCE_ALONE
        self._lag = max(2 * self.persistence, round(LAG * band.values))
        self._memory = max(30, round(MEMORY * band.values))
        self._recent: deque[float] = deque()  # deviations that are too recent for the offset
        self._steps: deque[float] = deque(maxlen=self._memory + self._lag)
        self._offset, self._offset_values = 0.0, 0
        self._last: float | None = None
        self.noise_ratio = 1.0  # of this run to the reference: 1 to MAX_NOISE_RATIO
        self._nonfinite = 0
        self._signs: list[tuple[float, float]] = []  # up and down of each tested value
        self._tested: list[int] = []  # number of the value of each
        self._deviations: list[tuple[float, float]] = []  # value and expected value of each
        self.count = 0
        self.is_over = False  # the run is longer than the reference
        self.divergence: Divergence | None = None

    def _update_noise_ratio(self) -> None:
        """Compare the noise of this run's values with that of the reference's."""
        older = list(self._steps)[: max(len(self._steps) - self._lag, FIRST_VALUES)]
        if len(older) >= FIRST_VALUES and self.count % RATIO_INTERVAL == 0:
            ratio = float(np.median(older)) / max(self.standard.reference_step, 1e-12)
            self.noise_ratio = min(max(ratio, 1.0), MAX_NOISE_RATIO)

    def add(self, x: float, value: float) -> Divergence | None:
        """Add a value at ``x`` samples (or steps); return the divergence when it is certain."""
        number = self.count
        self.count += 1
        if self.divergence is not None or self.is_over:
            return None
        if not math.isfinite(value):
            self._nonfinite += 1
            if self._nonfinite >= MAX_NONFINITE:
                start = number - self._nonfinite + 1
                expected = self.standard.band.at(x).mean
                self.divergence = Divergence("nonfinite", start, number, value, expected)
            return self.divergence
        self._nonfinite = 0
        found = self.residual(x, value)
        if found is None:
            return None
        if number < FIRST_VALUES:
            return None
        self._signs.append((found.up, found.down))
        self._tested.append(number)
        alarm = self._test.add(found.up, found.down)
        if alarm is not None:
            self._judge(alarm, number)
        return self.divergence

    def residual(self, x: float, value: float) -> Residual | None:
        """Return a value's deviation, and learn the run's offset; None outside the reference."""
        band = self.standard.band
        if x < band.x[0]:
            return None
        if x > band.end:
            self.is_over = True
            return None
        at = band.at(x)
        if self._last is not None:
            self._steps.append(abs(value - self._last) / at.noise)
        self._last = value
        lowest, highest = at.low - at.offset, at.high + at.offset
        offset = min(max(self._offset, lowest - at.mean), highest - at.mean)
        self._update_noise_ratio()
        scale = at.noise * self.noise_ratio
        deviation = value - at.mean
        # Until the offset is known, it may be any of the band. A run may also return to the curve.
        unknown = max(0.0, 1 - self._offset_values / (LEARNED * self._memory)) * at.offset
        above = at.high - at.mean + max(offset, 0.0) + unknown
        below = at.mean - at.low + max(-offset, 0.0) + unknown
        up = (deviation - above) / scale - self._tolerance
        down = (-deviation - below) / scale - self._tolerance
        is_level = unknown == 0 and at.high - at.low < scale
        centered = (deviation - offset) / scale if is_level else None
        self._deviations.append((value, at.mean + offset))
        self._learn(deviation)
        return Residual(centered, up, down)

    def _learn(self, deviation: float) -> None:
        self._recent.append(deviation)
        if len(self._recent) <= self._lag:
            return
        older = self._recent.popleft()
        self._offset_values += 1
        share = max(1 / self._offset_values, 1 / self._memory)
        self._offset += share * (older - self._offset)

    def _judge(self, alarm: Alarm, number: int) -> None:
        """Decide whether a deviation lasts, or has recovered."""
        since = self._signs[alarm.start :]
        if len(since) < self.persistence:
            return
        column = 0 if alarm.direction > 0 else 1
        excess = np.array([pair[column] for pair in since])
        recent = np.sort(excess[-max(4, self.persistence // 2) :])
        lasting = 0.5 * float(np.mean(np.clip(excess, -MAX_Z, MAX_Z)))
        if np.median(recent) < lasting:
            self._test.forget()
        if recent[len(recent) // 8] < lasting:  # it may be recovering: the next values decide
            return
        pairs = np.array(self._deviations[-len(since) :])
        kind = "high" if alarm.direction > 0 else "low"
        start = self._tested[alarm.start]
        means = pairs.mean(axis=0)
        self.divergence = Divergence(kind, start, number, float(means[0]), float(means[1]))
