"""Figures derived from the runs of a study: throughput, speed-up, efficiency, POP factors.

Definitions: docs/reference/measures.md, "Scaling".
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...significance import error_of_mean, half_width
from .study_model import RunFigures, ScalingStudy, SizePoint

INTERVAL_TAIL = 0.05  # probability of each end of an interval to be wrong
BLOCKS = 8  # of consecutive steps of a run
NORMAL_QUANTILE = 1.6449  # of the normal distribution, for INTERVAL_TAIL


@dataclass(frozen=True)
class Estimate:
    """A median over runs, and its 90 % confidence interval.

    Attributes:
        value: Median of the runs.
        low, high: Interval, from the spread between runs; with one run from the spread between
            blocks of its steps, which does not contain what differs between runs. Infinite
            (``high``) and 0 (``low``) if neither is known.
        runs: Number of runs.
    """

    value: float
    low: float
    high: float
    runs: int

    @property
    def is_between_runs(self) -> bool:
        """Whether the interval contains the differences between runs."""
        return self.runs > 1

    @property
    def precision(self) -> float:
        """Half width of the interval relative to the value."""
        return (self.high - self.low) / (2 * self.value) if self.value else math.inf

    def over(self, other: "Estimate") -> "Estimate":
        """Return the ratio of two independent estimates; errors of the logarithms add up."""
        value = self.value / other.value
        below = math.hypot(_log(self.value, self.low), _log(other.high, other.value))
        above = math.hypot(_log(self.high, self.value), _log(other.value, other.low))
        runs = min(self.runs, other.runs)
        return Estimate(value, value * math.exp(-below), value * _exp(above), runs)

    def times(self, factor: float) -> "Estimate":
        """Return the estimate times a positive number."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.runs)


def estimate(values: Sequence[float], error: float | None = None) -> Estimate:
    """Return the median of positive values and its interval.

    Args:
        values: One for each run.
        error: Relative standard error of the value of a single run, if it is known.
    """
    middle, logs = statistics.median(values), [math.log(value) for value in values]
    mean = statistics.fmean(logs)
    half = half_width(logs, INTERVAL_TAIL)
    if len(values) == 1 and error is not None:
        half = NORMAL_QUANTILE * error
    low, high = math.exp(mean - half) if math.isfinite(half) else 0.0, _exp(mean + half)
    return Estimate(middle, min(low, middle), max(high, middle), len(values))


def throughput(point: SizePoint) -> Estimate | None:
    """Return X(P) in samples/s of the whole job; None without a run."""
    return _estimate_of(point, "throughput")


def step_time(point: SizePoint) -> Estimate | None:
    """Return the mean duration of a step in s; None without a run."""
    return _estimate_of(point, "mean_step_s")


def _estimate_of(point: SizePoint, name: str) -> Estimate | None:
    values = [float(getattr(run, name)) for run in point.figures]
    known = [at for at, value in enumerate(values) if value > 0]
    if not known:
        return None
    return estimate([values[at] for at in known], relative_error(point.figures[known[0]]))


def relative_error(run: RunFigures) -> float | None:
    """Return the relative standard error of the mean step of one run; None with few steps."""
    if len(run.step_s) < BLOCKS or not run.mean_step_s:
        return None
    blocks = [float(part.mean()) for part in np.array_split(np.array(run.step_s), BLOCKS)]
    error = error_of_mean(blocks)
    return None if error is None else error / run.mean_step_s


@dataclass(frozen=True)
class Scaling:
    """One size against the smallest one of its kind.

    Attributes:
        speedup: X(P) / X(P_ref).
        efficiency: Speed-up / (P / P_ref).
        computation: Computation scalability CS; None if a figure for it is missing.
        global_efficiency: GE = useful share x CS.
    """

    point: SizePoint
    reference: SizePoint
    throughput: Estimate
    speedup: Estimate
    efficiency: Estimate
    computation: float | None
    global_efficiency: float | None


def scaling(study: ScalingStudy, kind: str) -> list[Scaling]:
    """Return the measured sizes of a kind, by ascending ranks; the first one is the reference."""
    measured = [(point, x) for point in study.of_kind(kind) if (x := throughput(point)) is not None]
    result: list[Scaling] = []
    for point, rate in measured:
        reference, reference_rate = measured[0]
        ratio = Estimate(1.0, 1.0, 1.0, rate.runs)
        if point is not reference:
            ratio = rate.over(reference_rate)
        efficiency = ratio.times(reference.ranks / point.ranks)
        factor = computation_scalability(point, reference)
        useful = median_factor(point, "useful")
        whole = None if factor is None or useful is None else useful * factor
        result.append(Scaling(point, reference, rate, ratio, efficiency, factor, whole))
    return result


def computation_scalability(point: SizePoint, reference: SizePoint) -> float | None:
    """Return CS: useful time per sample at the reference over that of the point."""
    here, there = useful_per_sample(point), useful_per_sample(reference)
    return there / here if here and there else None


def useful_per_sample(point: SizePoint) -> float | None:
    """Return the useful seconds of all ranks per sample: median of the runs."""
    values = [
        run.seconds.useful * point.ranks / run.samples_per_step
        for run in point.figures
        if run.samples_per_step
    ]
    return statistics.median(values) if values else None


def median_factor(point: SizePoint, name: str) -> float | None:
    """Return the median of a POP factor over the runs; None if no run has it."""
    values = [value for run in point.figures if (value := run.pop.get(name)) is not None]
    return statistics.median(values) if values else None


def median_state(point: SizePoint, state: str) -> float | None:
    """Return the median seconds per step and rank in a state; None without a run."""
    values = [float(getattr(run.seconds, state)) for run in point.figures]
    return statistics.median(values) if values else None


def _log(above: float, below: float) -> float:
    return math.log(above / below) if below > 0 and math.isfinite(above) else math.inf


def _exp(power: float) -> float:
    return math.exp(power) if power < 700 else math.inf  # 700: below overflow
