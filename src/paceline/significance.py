"""Decide whether measured differences are more than chance, also after several looks at them.

Every function states the probability of a wrong decision as ``tail`` or ``level``.

- Student's t for a mean of few values; the closed form for whole degrees of freedom is
  Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
- Several looks at growing data: group-sequential tests with linear error spending (Lan and DeMets
  1983; Kim and DeMets 1987). The levels of the looks add up, so that the bound holds for any
  dependence between them (Boole's inequality). The intervals are repeated confidence intervals
  (Jennison and Turnbull 1989): all of them are right together.
- Several tests one after the other: the fallback procedure (Wiens 2003).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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
