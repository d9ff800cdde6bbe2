"""Find the figures of one kind that are worse than the others by more than the variation of all."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ...significance import student_quantile
from ..machine.named_figures import NamedFigure, typical_deviation

_ALONE = 0.05  # relative difference between two devices of one kind that is normal
MIN_DEVIATIONS = 4.0  # threshold in usual deviations of one repetition, and ...
MIN_MADS = 4 * 1.4826  # ... in median absolute deviations between the peers
# Standard deviation between equal hosts, devices or links in one measurement, relative to it, as
# assumed where there are few; it counts as much as this number of peers.
EQUAL_MEMBERS = 0.02
EQUAL_MEMBERS_DEGREES = 4
FALSE_SLOW_LEVEL = 0.05  # probability of calling one of equal members slow in one kind of figure
_MAD_SCALE = 1.4826  # from the MAD to a normal distribution's standard deviation
_MAD_EFFICIENCY = 0.37  # degrees of freedom of the MAD over those of a standard deviation
_MEDIAN_VARIANCE = 1.57  # variance of a median over that of a mean, for a normal distribution
_EACH = 64  # members; with more, leaving one out does not change the median


@dataclass(frozen=True)
class SlowerFigure:
    """Figure that is worse than its peers.

    Attributes:
        named: The figure.
        peers: Median of the peers.
        by: Lost share of the speed.
    """

    named: NamedFigure
    peers: float
    by: float


def find_slower(members: Sequence[NamedFigure]) -> list[SlowerFigure]:
    """Return the members that are worse than the median of their peers.

    The difference must exceed the member's own spread, the usual spread, the differences among
    the peers, and ``worst_by_chance``. At least three members are needed, so that the outlier
    itself can't be the median. Of two members it is unknown which is the outlier: see ``differ``.
    """
    if len(members) < 3:
        return []
    noise = MIN_DEVIATIONS * typical_deviation([named.figure for named in members])
    values = [named.figure.median for named in members]
    all_of_them = around(values)
    found = []
    for i, named in enumerate(members):
        middle, apart = all_of_them if len(values) > _EACH else around(values[:i] + values[i + 1 :])
        worse = behind(named, middle)
        if worse is None:
            continue
        chance = worst_by_chance(middle, apart, len(members) - 1)
        if _gap(named, middle) > max(noise, MIN_MADS * apart, chance):
            found.append(worse)
    return sorted(found, key=lambda worse: -worse.by)


def differ(members: Sequence[NamedFigure]) -> SlowerFigure | None:
    """Return the worse of two members if they differ by more than their spreads."""
    first, second = members
    if not first.figure.median or not second.figure.median:
        return None
    if (first.figure.median < second.figure.median) != first.more_is_better:
        first, second = second, first
    noise = MIN_DEVIATIONS * typical_deviation([first.figure, second.figure])
    gap = _gap(first, second.figure.median)
    worse = behind(first, second.figure.median)
    chance = worst_by_chance(second.figure.median, 0.0, 1)
    return worse if gap > max(noise, second.figure.spread, chance) else None


def worst_by_chance(middle: float, apart: float, peers: int) -> float:
    """Return by how much the worst of equal members is worse than the median of its peers.

    Exceeded in ``FALSE_SLOW_LEVEL`` of cases. Few peers may be alike by chance: their variance is
    averaged with the assumed one, weighted by degrees of freedom (as in Smyth 2004).

    Args:
        middle: Median of the peers.
        apart: Median absolute deviation of the peers from it.
        peers: Number of peers.
    """
    known = int(_MAD_EFFICIENCY * (peers - 1))
    degrees = EQUAL_MEMBERS_DEGREES + known
    assumed, seen = EQUAL_MEMBERS * middle, _MAD_SCALE * apart
    variance = (EQUAL_MEMBERS_DEGREES * assumed**2 + known * seen**2) / degrees
    quantile = student_quantile(FALSE_SLOW_LEVEL / (peers + 1), degrees)
    return quantile * math.sqrt(variance * (1 + (_MEDIAN_VARIANCE if peers > 2 else 1) / peers))


def around(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the median absolute deviation from it."""
    middle = median(values)
    return middle, median(abs(value - middle) for value in values)


def behind(named: NamedFigure, middle: float) -> SlowerFigure | None:
    """Return a figure as worse than ``middle``; None if the difference is irrelevant.

    The difference must exceed the figure's spread and the smallest relevant difference.
    """
    value = named.figure.median
    slow, fast = (value, middle) if named.more_is_better else (middle, value)
    by = 1 - slow / fast if fast > 0 else 0.0
    real = by > max(named.worth, _ALONE) and _gap(named, middle) > named.figure.spread
    return SlowerFigure(named, middle, by) if real else None


def _gap(named: NamedFigure, middle: float) -> float:
    gap = middle - named.figure.median
    return gap if named.more_is_better else -gap
