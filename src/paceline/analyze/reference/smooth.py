"""Smoothing of a series by local lines, in windows that grow from the start of the training."""

import numpy as np

from .series import Floats

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
