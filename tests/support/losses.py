"""Synthetic losses of healthy and faulty trainings."""

import numpy as np

from paceline.analyze.reference.metric import Metric
from paceline.analyze.reference.series import Reference, Series

BATCH = 32


def healthy(seed: int, count: int = 500, correlation: float = 0.0) -> np.ndarray:
    """Return a loss that falls from 2.3 to 0.3, with noise and an offset of its own."""
    draw = np.random.default_rng(seed)
    step = np.arange(1, count + 1)
    curve = 0.3 + 2 * np.exp(-step / (60 * draw.normal(1, 0.04)))
    noise = draw.normal(size=count)
    for i in range(1, count):
        noise[i] = correlation * noise[i - 1] + (1 - correlation**2) ** 0.5 * noise[i]
    return curve + draw.normal(0, 0.01) + noise * noise_of(curve)


def noise_of(curve: np.ndarray) -> np.ndarray:
    return 0.02 + 0.05 * curve


def series(values: np.ndarray, samples: bool = True) -> Series:
    steps = np.arange(1.0, len(values) + 1)
    unknown = np.full(len(values), np.nan)
    seen = BATCH * steps if samples else np.zeros(len(values))
    return Series(steps, seen, np.asarray(values, float), unknown, unknown)


def reference(seeds=(0, 1, 2), **options) -> Reference:
    return Reference(Metric(), [series(healthy(seed, **options)) for seed in seeds])
