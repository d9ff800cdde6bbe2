"""Decide whether measured differences are more than chance, also after several looks at them.

Every function states the probability of a wrong decision as ``tail`` or ``level``.

- Student's t for a mean of few values; the closed form for whole degrees of freedom is
  Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
- Several looks at growing data: group-sequential tests with linear error spending (Lan and DeMets
  1983; Kim and DeMets 1987). The levels of the looks add up, so that the bound holds for any
  dependence between them (Boole's inequality). The intervals are repeated confidence intervals
  (Jennison and Turnbull 1989): all of them are right together.
- Several tests one after the other: the fallback procedure (Wiens 2003).
- The slowest of several ranks: the largest of their t statistics, with the level divided by the
  number of ranks (Bonferroni). Differences between chosen ranks: one half of the data chooses the
  ranks, the other half measures the difference, and the other way round (cross-fitting).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

FALSE_SLOWEST_LEVEL = 0.05  # probability of calling one of equal ranks slower than the others
CHANCE_TAIL = 0.025  # probability that a difference by chance exceeds its limit, on each side
MIN_DEGREES = 2  # degrees of freedom from which on the spread between runs is measured
MIN_BLOCKS = 4  # blocks of steps; with fewer, nothing is said
MAX_DEGREES = 200  # degrees of freedom from which on Student's t is computed with this number


def student_tail(t: float, degrees: int) -> float:
    """Return the probability that Student's t exceeds ``t`` >= 0."""
    degrees = min(degrees, MAX_DEGREES)
    angle = math.atan2(t, math.sqrt(degrees))
    cosine = math.cos(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(2 + odd, degrees + 1, 2):
        total += term
        term *= cosine**2 * (power - 1) / power
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return (1 - inside) / 2


@lru_cache(1024)
def student_quantile(tail: float, degrees: int) -> float:
    """Return the value that Student's t exceeds with probability ``tail`` (0 < ``tail`` < 0.5)."""
    assert 0 < tail < 0.5, tail
    assert degrees > 0, degrees
    low, high = 0.0, 1.0
    while student_tail(high, degrees) > tail and high < 1e12:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, degrees) > tail else (low, middle)
    return high


def half_width(values: Sequence[float], tail: float) -> float:
    """Return half of the interval of the mean of ``values``; each end is wrong in ``tail``.

    Infinite for fewer than two values.
    """
    if len(values) < 2:
        return math.inf
    error = statistics.stdev(values) / math.sqrt(len(values))
    return student_quantile(tail, len(values) - 1) * error


def gain_of_pairs(logs: Sequence[float], tail: float) -> tuple[float, float, float]:
    """Return the gain of the throughput by a setting, and both ends of its interval.

    The setting helps if the lower end is above zero: then a setting without an effect is kept with
    probability ``tail``. The mean of the logarithms is zero without an effect, whatever the noise.

    Args:
        logs: Of each pair of measurements, one with and one without the setting: logarithm of the
            ratio of their throughputs.
        tail: Probability that an end is wrong.
    """
    mean, half = statistics.fmean(logs), half_width(logs, tail)
    of_mean, low, high = (
        math.expm1(min(log, 700.0))  # 700: below overflow
        for log in (mean, mean - half, mean + half)
    )
    return of_mean, low, high


def tail_of_look(count: int, looks: Sequence[int], level: float) -> float:
    """Return the part of ``level`` that a look after ``count`` values spends.

    The parts are proportional to the number of values since the look before, and add up to
    ``level`` at the last look.
    """
    assert count in looks, (count, looks)
    at = looks.index(count)
    before = looks[at - 1] if at else 0
    return level * (count - before) / looks[-1]


@dataclass
class SharedLevel:
    """Probability of any wrong decision, shared by tests that are made one after the other.

    Each test gets an equal share. A test that finds an effect hands its level on to the next one,
    because it was not wrong if there is an effect, and the level is already spent if there is none.

    Attributes:
        share: Share of each test.
        carried: Level that the test before handed on.
    """

    share: float
    carried: float = 0.0

    @classmethod
    def among(cls, tests: int, level: float) -> "SharedLevel":
        """Share ``level`` among a number of tests."""
        return cls(level / max(tests, 1))

    @property
    def level(self) -> float:
        """Level of the next test."""
        return self.share + self.carried

    def decided(self, handed_on: bool) -> None:
        """Go on to the next test.

        ``handed_on``: Whether the test found an effect, or was not made.
        """
        self.carried = self.level if handed_on else 0.0


def is_slowest(times: npt.NDArray[np.float64]) -> bool | None:
    """Whether the rank with the longest time is slower than the others by more than chance.

    Args:
        times: Time of a step of each rank in each block of consecutive steps: (ranks, blocks).

    Returns:
        None with fewer than ``MIN_BLOCKS`` blocks, or one rank.
    """
    ranks, blocks = times.shape
    if ranks < 2 or blocks < MIN_BLOCKS:
        return None
    slowest = int(times.sum(axis=1).argmax())
    excess = (times - times.mean(axis=0)) * ranks / (ranks - 1)  # over the mean of the others
    parts = _block_lengths(excess)
    errors = [part.var(axis=1, ddof=1) / part.shape[1] for part in parts]
    if len(errors) > 1:  # of long blocks, if each doubling of the length removes half of the error
        errors.append(2 * errors[1] - errors[0])
        parts.append(parts[1])
    noise = []
    for part, variances in zip(parts, errors, strict=True):
        variance = max(float(variances.mean()), float(variances[slowest]), 0.0)
        degrees = (ranks - 1) * (part.shape[1] - 1)
        quantile = student_quantile(FALSE_SLOWEST_LEVEL / ranks, degrees)
        noise.append(quantile * math.sqrt(variance))
    return bool(excess[slowest].mean() > max(noise))


def error_of_mean(blocks: Sequence[float]) -> float | None:
    """Return the standard error of the mean of blocks of consecutive steps.

    None with fewer than ``MIN_BLOCKS`` blocks.
    """
    if len(blocks) < MIN_BLOCKS:
        return None
    parts = _block_lengths(np.array(blocks, np.float64))
    return max(float(part.std(ddof=1) / math.sqrt(len(part))) for part in parts)


def range_by_chance(deviation: float, values: int, members: int) -> float:
    """Return the range of the means of equal members, exceeded in 5 % of cases.

    Args:
        deviation: Standard deviation of one value.
        values: Number of values of each member's mean.
        members: Number of members, of which each pair may be the one that differs most.
    """
    pairs = members * (members - 1) / 2
    if not pairs or not values:
        return 0.0
    quantile = statistics.NormalDist().inv_cdf(1 - FALSE_SLOWEST_LEVEL / (2 * pairs))
    return quantile * deviation * math.sqrt(2 / values)


def _block_lengths(values: npt.NDArray[np.float64]) -> list[npt.NDArray[np.float64]]:
    """Return the blocks (last axis), and if there are enough, the means of neighbouring blocks.

    Neighbouring blocks may be alike, because what disturbs a step lasts longer than a block. Then
    longer blocks differ more than single ones suggest.
    """
    count = values.shape[-1] // 2
    if count < MIN_BLOCKS:
        return [values]
    pairs = values[..., : 2 * count].reshape(*values.shape[:-1], count, 2)
    return [values, pairs.mean(axis=-1)]


@dataclass(frozen=True)
class RankSpread:
    """How much the times of ranks differ all the time, without the differences by chance.

    Attributes:
        longest_minus_shortest: Of the slowest and the fastest rank; negative by chance.
        longest_minus_mean: Of the slowest rank and the mean of all; negative by chance.
    """

    longest_minus_shortest: float
    longest_minus_mean: float


def rank_spread(times: npt.NDArray[np.float64]) -> RankSpread:
    """Return the constant differences between ranks.

    Ranks are chosen in one half of the blocks and compared in the other half: in the blocks that
    choose them their difference is never negative, also of equal ranks. Blocks belong to the halves
    two by two in turn: both halves contain the begin and the end, and few blocks of one half are
    neighbours of the other.

    Args:
        times: Time of each rank in each block: (ranks, blocks).
    """
    count = times.shape[1]
    first = np.arange(count) // (2 if count > 3 else 1) % 2 == 0
    halves = (times[:, first], times[:, ~first]) if count > 1 else (times, times)
    chosen, measured = ([half.mean(axis=1) for half in order] for order in (halves, halves[::-1]))
    ranges, behind = [], []
    for choice, taken in zip(chosen, measured, strict=True):
        longest = taken[choice.argmax()]
        ranges.append(longest - taken[choice.argmin()])
        behind.append(longest - taken.mean())
    return RankSpread(float(np.mean(ranges)), float(np.mean(behind)))


@dataclass(frozen=True)
class Difference:
    """Difference between the means of two groups of runs, and how much of it may be chance.

    Attributes:
        noise: Standard error of the difference: from the spread between the runs of a group; with
            one run of each from the spread within the runs, and an assumed one between them. None
            where there are too few runs, and a spread within a run is not known.
        degrees: Degrees of freedom of ``noise``; None: it is not measured between runs.
    """

    before: float
    after: float
    noise: float | None
    degrees: int | None

    def limit(self, tail: float = CHANCE_TAIL) -> float | None:
        """Return what a difference by chance exceeds with probability ``tail``, on each side."""
        if self.noise is None:
            return None
        if self.degrees is None:
            return statistics.NormalDist().inv_cdf(1 - tail) * self.noise
        return student_quantile(tail, self.degrees) * self.noise

    @property
    def real(self) -> bool | None:
        limit = self.limit()
        return None if limit is None else abs(self.after - self.before) > limit


def difference_of_runs(
    groups: Sequence[Sequence[float]],
    errors: Sequence[Sequence[float | None]],
    between: Sequence[float],
) -> Difference:
    """Return the difference of two groups of runs.

    Args:
        groups: Value of each run before and after.
        errors: Standard error of each value within its run.
        between: Assumed standard deviation between runs, before and after.
    """
    means = [statistics.fmean(values) for values in groups]
    degrees = sum(len(values) - 1 for values in groups)
    if degrees >= MIN_DEGREES:
        squares = [
            (value - mean) ** 2
            for values, mean in zip(groups, means, strict=True)
            for value in values
        ]
        variance = sum(squares) / degrees
        noise = math.sqrt(variance * sum(1 / len(values) for values in groups))
        return Difference(means[0], means[1], noise, degrees)
    variance = 0.0
    for values, within, spread in zip(groups, errors, between, strict=True):
        for error in within:
            if error is None:
                return Difference(means[0], means[1], None, None)
            variance += (error**2 + spread**2) / len(values) ** 2
    return Difference(means[0], means[1], math.sqrt(variance), None)
