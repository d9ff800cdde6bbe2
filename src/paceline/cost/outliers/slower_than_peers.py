"""Which of some figures of one kind are worse than the others, by more than all of them vary."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ..machine.named_figures import Named, usual

_ALONE = 0.05  # relative difference between two pieces of one kind that nobody would call odd
SPREADS = 4.0  # usual deviations of one repetition, and ...
APART = 4 * 1.4826  # ... medians of absolute deviations between the peers, that are not odd yet
_EACH = 64  # members; with more the median with and without one of them is the same


@dataclass(frozen=True)
class Worse:
    """One figure that is worse than its peers' median; by: the part of the speed that is lost."""

    named: Named
    peers: float
    by: float


def slower(members: Sequence[Named]) -> list[Worse]:
    """Those that are worse than the median of their peers by more than their own spread, than the
    usual one and than the peers differ among each other. Needs three members, to have a median
    that a single one can't be; of two nobody can say which is odd: see ``differ``."""
    if len(members) < 3:
        return []
    noise = SPREADS * usual([named.figure for named in members])
    values = [named.figure.median for named in members]
    all_of_them = around(values)
    found = []
    for i, named in enumerate(members):
        middle, apart = all_of_them if len(values) > _EACH else around(values[:i] + values[i + 1 :])
        worse = behind(named, middle)
        if worse is not None and _gap(named, middle) > max(noise, APART * apart):
            found.append(worse)
    return sorted(found, key=lambda worse: -worse.by)


def differ(members: Sequence[Named]) -> Worse | None:
    """Of two members the worse one, if they differ by more than their spreads."""
    first, second = members
    if not first.figure.median or not second.figure.median:
        return None
    if (first.figure.median < second.figure.median) != first.more_is_better:
        first, second = second, first
    noise = SPREADS * usual([first.figure, second.figure])
    gap = _gap(first, second.figure.median)
    worse = behind(first, second.figure.median)
    return worse if gap > max(noise, second.figure.spread) else None


def around(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the median of the distances from it."""
    middle = median(values)
    return middle, median(abs(value - middle) for value in values)


def behind(named: Named, middle: float) -> Worse | None:
    """The figure as worse than that by more than its own spread, if it is so and anybody would
    care."""
    value = named.figure.median
    slow, fast = (value, middle) if named.more_is_better else (middle, value)
    by = 1 - slow / fast if fast > 0 else 0.0
    real = by > max(named.worth, _ALONE) and _gap(named, middle) > named.figure.spread
    return Worse(named, middle, by) if real else None


def _gap(named: Named, middle: float) -> float:
    gap = middle - named.figure.median
    return gap if named.more_is_better else -gap
