"""What the gradient noise scale of a study's runs says of larger batches."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from ..study_model import NoiseFigures, ScalingStudy

Band = tuple[float, float, float]  # value, low, high


@dataclass(frozen=True)
class LargerBatch:
    """A batch that is larger than that of the smallest size.

    Attributes:
        batch: Samples of a step.
        ranks: Number of ranks.
        is_measured: Whether the size was measured; else it was predicted.
        steps: Steps to the same loss, relative to those with the smallest size's batch.
        samples: The same for samples.
    """

    batch: int
    ranks: int
    is_measured: bool
    steps: Band
    samples: Band


@dataclass(frozen=True)
class BatchAdvice:
    """The noise scale of a study, and what it says of its batches.

    Attributes:
        base: Batch of the smallest size.
        samples, low, high: Noise scale with its 95 % interval, medians of the runs; None if it is
            undetermined.
        runs: Number of runs that measured it.
        larger: Larger batches, ascending; [] if it is undetermined.
    """

    base: int
    samples: float | None
    low: float | None
    high: float | None
    runs: int
    larger: list[LargerBatch]


def noise_of_runs(found: list[NoiseFigures]) -> Band | None:
    """Return the noise scale of several runs; None if at least half of them do not know it."""
    known = [
        (figures.samples, figures.low, figures.high)
        for figures in found
        if figures.samples is not None and figures.high is not None
    ]
    if 2 * len(known) <= len(found):
        return None
    middle, low, high = (statistics.median(of) for of in zip(*known, strict=True))
    return middle, low, high


def noise_figures(study: ScalingStudy, kind: str) -> list[NoiseFigures]:
    """Return the noise scales of all runs of a kind that measured it."""
    each = [figures for point in study.of_kind(kind) for figures in point.figures]
    return [figures.noise for figures in each if figures.noise is not None]


def batch_advice(study: ScalingStudy, kind: str) -> BatchAdvice | None:
    """Return what the noise scale says; None if no run measured it, or the batch does not grow."""
    measured = {p.setup.global_batch: p.ranks for p in study.of_kind(kind) if p.figures}
    if not measured:
        return None
    base, found = min(measured), noise_figures(study, kind)
    predicted = {p.global_batch: p.ranks for p in study.predictions if p.kind == kind}
    larger = {batch: ranks for batch, ranks in (predicted | measured).items() if batch > base}
    if not larger or not found:
        return None
    noise = noise_of_runs(found)
    if noise is None:
        return BatchAdvice(base, None, None, None, len(found), [])
    rows = [
        LargerBatch(batch, ranks, batch in measured, *_relative(noise, base, batch))
        for batch, ranks in sorted(larger.items())
    ]
    return BatchAdvice(base, *noise, len(found), rows)


def _relative(noise: Band, base: int, batch: int) -> tuple[Band, Band]:
    """Return steps and samples to the same loss, relative to the base (arXiv 1812.06162, 2.11)."""
    steps = _band(noise, lambda of: (1 + of / batch) / (1 + of / base))
    return steps, _band(noise, lambda of: (of + batch) / (of + base))


def _band(noise: Band, ratio: Callable[[float], float]) -> Band:
    """Return a ratio at the noise scale, and its range over the interval."""
    value, *ends = (float(ratio(of)) for of in noise)
    return value, min(ends), max(ends)
