"""The band of a reference: its mean curve, the noise of a value, and the spread between runs.

All runs are compared at the same number of samples (or steps). A value of a run is

    curve of the reference + offset of the run (slow) + noise of the value

The noise is measured as the residuals of each run from its own smoothed curve. The width of the
smoothing is the one that predicts left-out values best. The spread of offsets is that of the
smoothed curves around their mean. With a single run it can't be measured, and is assumed:
``UNKNOWN_SPREAD`` of the curve's value.
"""

from dataclasses import dataclass

import numpy as np

from .series import MIN_VALUES, Floats, Reference, Series

# Smoothing of a series by local lines, in windows that grow from the start of the training.

MIN_HALF_WIDTH = 3  # values on each side
GROWTH = 0.15  # half width of a window, as a share of the values before it: losses fall fast first


def half_widths(count: int, limit: float) -> Floats:
    """Return the half width of the window around each of ``count`` values."""
    return np.clip(GROWTH * np.arange(count), MIN_HALF_WIDTH, max(limit, MIN_HALF_WIDTH))


def local_lines(x: Floats, y: Floats, limit: float) -> Floats:
    """Return, at each x, the value of the line fitted to the values of its window.

    Args:
        x, y: The series; x increases.
        limit: Largest half width of a window, in values.
    """
    count = len(x)
    low, high = _windows(count, limit)
    center = x - x.mean()

    def sums(values: Floats) -> Floats:
        cumulative = np.concatenate(([0.0], np.cumsum(values)))
        return np.asarray(cumulative[high] - cumulative[low])

    number = (high - low).astype(float)
    mean_x, mean_y = sums(center) / number, sums(y) / number
    variance = sums(center * center) / number - mean_x**2
    covariance = sums(center * y) / number - mean_x * mean_y
    slope = np.where(variance > 0, covariance / np.where(variance > 0, variance, 1.0), 0.0)
    return np.asarray(mean_y + slope * (center - mean_x))


def local_means(y: Floats, limit: float) -> Floats:
    """Return the mean of the values in the window around each."""
    low, high = _windows(len(y), limit)
    cumulative = np.concatenate(([0.0], np.cumsum(y)))
    return np.asarray((cumulative[high] - cumulative[low]) / (high - low))


def _windows(count: int, limit: float) -> tuple[np.ndarray, np.ndarray]:
    half = half_widths(count, limit).astype(int)
    at = np.arange(count)
    return np.maximum(at - half, 0), np.minimum(at + half + 1, count)


WIDTHS = (1 / 100, 1 / 50, 1 / 25, 1 / 12, 1 / 6)  # candidate half widths, of the run's length
FOLDS = 4  # left-out parts, to choose the width
NOISE_WIDTH = 1 / 10  # of the run's length: window in which the noise is measured
# A run may be this share of its samples, and this share of the whole training, ahead of or behind
# the reference: losses stay on a plateau for different times, and fall steeply after it.
TIME_TOLERANCE, MIN_TIME_TOLERANCE = 0.1, 0.05
MAX_STRETCH = 4  # times that tolerance, where the runs of the reference need it
STRETCH_ALONE = 2  # the same with a single run, from which it can't be measured
MIN_EXPLAINED = 0.99  # of a run's curve, within the tolerance
UNKNOWN_SPREAD = 0.1  # standard deviation between seeds, as a share of the value, with one run
MIN_SPREAD = 0.25  # of the noise
OUTLIER = 4.0  # residuals beyond this many standard deviations count as this many
# Student's t at 0.995, for 2 (R - 1) degrees of freedom of R runs: offsets change along a run, so
# that each gives at least two independent ones.
_QUANTILES = {1: 3.0, 2: 9.92, 3: 4.60, 4: 3.71, 5: 3.36, 6: 3.17}
_QUANTILE = 3.0  # of more runs


@dataclass(frozen=True)
class Band:
    """The reference on one grid of samples (or steps).

    Attributes:
        x: The grid, increasing.
        mean: Mean curve of the runs.
        noise: Standard deviation of a value around the curve of its run.
        offset: Largest offset of a healthy run.
        low, high: Smallest and largest value of the mean curve within the tolerance of time.
        runs: Number of distinct runs.
        values: Median number of values of a run.
    """

    x: Floats
    mean: Floats
    noise: Floats
    offset: Floats
    low: Floats
    high: Floats
    runs: int
    values: int

    def at(self, x: float) -> "BandPoint":
        """Return the band at ``x``."""
        parts = (self.mean, self.noise, self.offset, self.low, self.high)
        return BandPoint(*(float(np.interp(x, self.x, part)) for part in parts))

    @property
    def end(self) -> float:
        return float(self.x[-1])


@dataclass(frozen=True)
class BandPoint:
    """The band at one number of samples. Attributes: those of ``Band``."""

    mean: float
    noise: float
    offset: float
    low: float
    high: float


def make_band(reference: Reference) -> Band:
    """Measure the band of a reference.

    Raises:
        ValueError: A run has too few values, or its values are not finite.
    """
    runs = reference.distinct_runs
    for run in runs:
        _check(run)
    axis = reference.axis
    usual = int(np.median([len(run) for run in runs]))
    start = max(float(run.along(axis)[0]) for run in runs)
    end = min(float(run.along(axis)[-1]) for run in runs)
    if not end > start:
        raise ValueError(
            f"the runs of the reference have no {axis} in common. HINT: make the reference again"
        )
    x = np.linspace(start, end, usual)
    half_width = choose_half_width(runs, axis)
    curves = np.stack([_curve(run, axis, x, half_width) for run in runs])
    noise = np.sqrt(np.mean([_variance(run, axis, x, half_width) for run in runs], axis=0))
    mean = curves.mean(axis=0)
    noise = np.maximum(noise, 1e-6 * np.maximum(np.abs(mean), 1e-6))
    stretch = _stretch(x, curves, mean, noise)
    low, high = _envelope(x, mean, stretch)
    offset = _QUANTILES.get(len(runs), _QUANTILE) * _spread(curves, low, high, noise)
    return Band(x, mean, noise, offset, low, high, len(runs), usual)


def _check(run: Series) -> None:
    where = f" of {run.name}" if run.name else ""
    if len(run) < MIN_VALUES:
        raise ValueError(
            f"the reference{where} has {len(run)} values, and at least {MIN_VALUES} are needed to "
            "measure their noise. HINT: log the loss in every step, or leave out --metric to use "
            "the loss of each backward"
        )
    if not np.all(np.isfinite(run.values)):
        at = int(np.flatnonzero(~np.isfinite(run.values))[0])
        raise ValueError(
            f"the reference{where} has the value {run.values[at]} at step {run.steps[at]:.0f}. "
            "HINT: a run whose loss is not finite is no reference; make it again"
        )


def choose_half_width(runs: list[Series], axis: str) -> float:
    """Return the half width of smoothing (in values) that predicts left-out values best."""
    count = min(len(run) for run in runs)
    errors = []
    for share in WIDTHS:
        total = 0.0
        for run in runs:
            x = run.along(axis)
            scale = np.sqrt(_variance(run, axis, x, count * WIDTHS[0]))
            scale = np.maximum(scale, 1e-12)
            for fold in range(FOLDS):
                kept = np.arange(len(run)) % FOLDS != fold
                # a window of the same width has fewer values
                limit = share * count * (FOLDS - 1) / FOLDS
                curve = local_lines(x[kept], run.values[kept], limit)
                error = (np.interp(x[~kept], x[kept], curve) - run.values[~kept]) / scale[~kept]
                total += float(np.sum(np.minimum(error**2, OUTLIER**2)))
        errors.append(total)
    return max(WIDTHS[int(np.argmin(errors))] * count, 1.0)


def _curve(run: Series, axis: str, x: Floats, half_width: float) -> Floats:
    at = run.along(axis)
    return np.interp(x, at, local_lines(at, run.values, half_width))


def _variance(run: Series, axis: str, x: Floats, half_width: float) -> Floats:
    """Return the local variance of the run's values around its curve."""
    at = run.along(axis)
    residual = run.values - local_lines(at, run.values, half_width)
    half = half_widths(len(at), half_width)
    residual = residual / np.sqrt(1 - 2 / (2 * half + 1))  # the curve follows the values partly
    squares = residual**2
    for _ in range(2):  # without outliers, which would widen the band around them
        local = local_means(squares, NOISE_WIDTH * len(at))
        squares = np.minimum(residual**2, OUTLIER**2 * np.maximum(local, 1e-30))
    return np.interp(x, at, local_means(squares, NOISE_WIDTH * len(at)))


def _spread(curves: Floats, low: Floats, high: Floats, noise: Floats) -> Floats:
    """Return the standard deviation of a new run's offset, beyond the tolerance of time."""
    runs = len(curves)
    if runs == 1:
        spread = UNKNOWN_SPREAD * np.abs(curves[0])
    else:
        mean = curves.mean(axis=0)
        # what lies within the envelope is not offset, but time; where it is flat, all is offset
        inside = np.minimum(high - mean, mean - low)
        beyond = np.maximum(np.abs(curves - mean) - np.maximum(inside, 0), 0)
        squares = np.sum(beyond**2, axis=0) / (runs - 1)
        local = local_means(squares, NOISE_WIDTH * len(mean))
        spread = np.sqrt(local * (1 + 1 / runs))
    return np.asarray(np.maximum(spread, MIN_SPREAD * noise))


def _stretch(x: Floats, curves: Floats, mean: Floats, noise: Floats) -> int:
    """Return the tolerance of time that the runs need, and one more for a new run."""
    if len(curves) == 1:
        return STRETCH_ALONE
    for stretch in range(1, MAX_STRETCH):
        low, high = _envelope(x, mean, stretch)
        inside = (curves >= low - noise) & (curves <= high + noise)
        if np.mean(inside) >= MIN_EXPLAINED:
            return stretch + 1 if stretch > 1 else 1
    return MAX_STRETCH


def _envelope(x: Floats, mean: Floats, stretch: int) -> tuple[Floats, Floats]:
    """Return the smallest and the largest value of the curve within the tolerance of each x."""
    shift = stretch * np.maximum(TIME_TOLERANCE * x, MIN_TIME_TOLERANCE * (x[-1] - x[0]))
    first = np.searchsorted(x, x - shift, "left")
    last = np.minimum(np.searchsorted(x, x + shift, "right"), len(x))
    pairs = list(zip(first.tolist(), last.tolist(), strict=True))
    low = np.array([mean[a : max(b, a + 1)].min() for a, b in pairs])
    high = np.array([mean[a : max(b, a + 1)].max() for a, b in pairs])
    return low, high
