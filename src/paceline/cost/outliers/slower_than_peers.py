"""Find the figures of one kind that are worse than the others by more than the variation of all."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ..machine.named_figures import NamedFigure, typical_deviation

_ALONE = 0.05  # relative difference between two devices of one kind that is normal
MIN_DEVIATIONS = 4.0  # threshold in usual deviations of one repetition, and ...
MIN_MADS = 4 * 1.4826  # ... in median absolute deviations between the peers
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

    The difference must exceed the member's own spread, the usual spread, and the differences among
    the peers. At least three members are needed, so that the outlier itself can't be the median. Of
    two members it is unknown which is the outlier: see ``differ``.
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
        if worse is not None and _gap(named, middle) > max(noise, MIN_MADS * apart):
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
    return worse if gap > max(noise, second.figure.spread) else None


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
