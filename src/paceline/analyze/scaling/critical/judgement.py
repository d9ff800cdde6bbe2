"""The critical batch from the runs of its measurement (Merrill et al. 2025, arXiv 2505.23971).

Runs with multiples of the batch continue from the same checkpoint for the same number of samples.
The smoothed loss at the end of each is compared with that of the base's run of the same seed, which
has seen the same samples in the same order. The critical batch is the largest one up to which no
loss is above the base's by more than the tolerance.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....significance import CHANCE_TAIL, half_width
from ...figures.noise_scale import NoiseScale, noise_scale_of_steps
from .critical_model import BranchPoint, BranchRun, StoredCritical

TAIL_SHARE = 0.25  # of a run's samples, at its end: their losses are averaged
MIN_TAIL_STEPS = 2
AGREES, SMALLER, LARGER = "agrees", "smaller", "larger"


@dataclass(frozen=True)
class MultipleResult:
    """One multiple of the batch.

    Attributes:
        batch: Samples of a step.
        rate_factor: Factor of the learning rate.
        parts: Accumulated batches of a step, relative to the base's.
        runs: Number of runs that are compared.
        loss: Mean over the seeds of the smoothed loss at the end; None without runs.
        difference: Loss over the base's, minus 1; None without runs. Infinite if it diverged.
        low, high: 95 % interval of the difference between seeds; infinite with one seed.
        failure: Why it has no runs, or "".
    """

    multiple: int
    batch: int
    rate_factor: float
    parts: int
    runs: int
    loss: float | None
    difference: float | None
    low: float
    high: float
    failure: str = ""

    def is_within(self, tolerance: float) -> bool | None:
        """Return whether the loss is within the tolerance; None: not known."""
        return None if self.difference is None else self.difference <= tolerance


@dataclass(frozen=True)
class CriticalBatch:
    """The result.

    Attributes:
        batch: The largest measured batch that is as good as the base; None: not known.
        low: As ``batch``, where the whole interval of the loss is within the tolerance.
        high: The smallest measured batch whose interval is above the tolerance; None: no one.
        is_largest: Whether it is the largest batch that was measured: the critical one may be
            larger.
        noise: Gradient noise scale of the base's runs; None: it was not measured.
        against_noise: Whether the noise scale's interval "agrees" with that from ``low`` to
            ``high``, or is "smaller" or "larger"; None: one of them is not known.
    """

    point: BranchPoint
    results: list[MultipleResult]
    batch: int | None
    low: int | None
    high: int | None
    is_largest: bool
    noise: NoiseScale | None
    against_noise: str | None


def end_loss(run: BranchRun, window: float) -> float:
    """Return the mean loss of the last samples of a run; infinite if one is not finite.

    window: Samples of the whole run.
    """
    samples = np.array(run.samples)
    inside = samples > (1 - TAIL_SHARE) * min(window, samples[-1])
    weights = np.diff(samples, prepend=0.0)[inside]
    losses = [loss for loss, used in zip(run.losses, inside, strict=True) if used]
    finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    return float(np.average(finite, weights=weights)) if len(finite) == len(losses) else math.inf


def judge(stored: StoredCritical) -> CriticalBatch:
    """Return the result of a measurement.

    Raises:
        ValueError: It has no runs that can be compared.
    """
    point, tolerance = stored.point, stored.request.tolerance
    runs = stored.of(1) if point is not None else []
    base = {run.seed: end_loss(run, point.window) for run in runs if run.losses and point}
    if point is None or not base:
        raise ValueError(
            "no run with the script's own batch has ended, so no batch can be compared with it. "
            "HINT: paceline scale --continue DIR"
        )
    results = [_result(stored, point, base, multiple) for multiple in stored.request.multiples]
    within = [result.is_within(tolerance) for result in results]
    good = _leading([of is True for of in within])
    sure = _leading(
        [result.difference is not None and result.high <= tolerance for result in results]
    )
    bad = [
        result.batch
        for result in results
        if result.difference is not None and result.low > tolerance
    ]
    known = all(of is not None for of in within[: good + 1])
    rows = [row for run in stored.of(1) for row in run.noise]
    noise = noise_scale_of_steps(np.array(rows, np.float64).reshape(-1, 4))
    low, high = results[sure - 1].batch, min(bad, default=None)
    return CriticalBatch(
        point,
        results,
        results[good - 1].batch if known else None,
        low,
        high,
        good == len(results),
        noise,
        _against(noise, low, high),
    )


def _leading(flags: Sequence[bool]) -> int:
    """Return how many of the flags are true before the first that is not; the base's always is."""
    return next((i for i, flag in enumerate(flags) if not flag and i), len(flags))


def _result(
    stored: StoredCritical, point: BranchPoint, base: dict[int, float], multiple: int
) -> MultipleResult:
    runs = [run for run in stored.of(multiple) if run.seed in base]
    ended = {run.seed: end_loss(run, point.window) for run in runs if run.losses}
    ended |= {run.seed: math.inf for run in runs if run.diverged}
    mean = statistics.fmean(base.values())
    differences = [(loss - base[seed]) / abs(mean) for seed, loss in ended.items()]
    middle, low, high = _interval(differences) if multiple > 1 else (0.0, 0.0, 0.0)
    return MultipleResult(
        multiple,
        multiple * point.batch,
        point.rate_factor(multiple),
        max((run.parts for run in runs), default=1),
        len(ended),
        statistics.fmean(ended.values()) if ended else None,
        middle if ended else None,
        low,
        high,
        next((run.failure for run in runs if run.failure), "") if not ended else "",
    )


def _interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of values and its 95 % interval; infinite limits with one value."""
    if any(math.isinf(value) for value in values):
        return math.inf, math.inf, math.inf
    if not values:
        return 0.0, -math.inf, math.inf
    mean, half = statistics.fmean(values), half_width(values, CHANCE_TAIL)
    return mean, mean - half, mean + half


def _against(noise: NoiseScale | None, low: int, high: int | None) -> str | None:
    if noise is None or noise.samples is None:
        return None
    if noise.high is not None and noise.high < low:
        return SMALLER
    return LARGER if high is not None and noise.low > high else AGREES
