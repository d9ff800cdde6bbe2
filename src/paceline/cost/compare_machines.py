"""Compare two machine files of one machine, for example before and after a maintenance.

A figure has changed if the logarithm of after / before exceeds what equal machines differ by. The
level is divided by the number of figures that are compared (Bonferroni), so that the probability of
any false change is ``FALSE_CHANGE_LEVEL``. The noise of a figure is that of its median, and as much
as a single repetition differs from the others: what disturbs a machine often lasts longer than a
measurement. Few repetitions may be alike by chance: their variance is averaged with the median of
all figures of the same sort, weighted by degrees of freedom (as in Smyth 2004).
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from ..significance import MAX_DEGREES, student_quantile
from .machine.machine_file import UNLIMITED, Figure, HostFacts, Machine
from .machine.named_figures import NamedFigure, deviation, group_figures, host_figures, link_figures
from .machine.units import format_value, join_words, size
from .outliers import EQUAL_MEMBERS, MEDIAN_VARIANCE

_MOST = 0.5  # share of the hosts above which a common change is reported once
FALSE_CHANGE_LEVEL = 0.05  # probability of calling any figure of an unchanged machine changed
MIN_REPETITIONS = 3  # with fewer, the deviation of a figure is assumed (named_figures.py)
# Degrees of freedom of a deviation that is estimated from quartiles: at least the first figure, or
# the second one for each repetition but one.
_QUARTILE_DEGREES = (1.7, 0.37)
_SAME_SORT_DEGREES = 4  # weight of the deviation of figures of the same sort


@dataclass(frozen=True)
class Change:
    """Difference between two machine files.

    Attributes:
        hosts: Names of the affected hosts; empty if the quantity belongs to all ranks together.
        what: Name of the quantity.
        before: Value in the first file.
        after: Value in the second file.
        sentence: Description for the user.
        by: Relative change, after / before - 1; None if the quantity is not a speed.
        better: Whether the change is an improvement; None if the quantity is not a speed.
    """

    hosts: tuple[str, ...]
    what: str
    before: str
    after: str
    sentence: str
    by: float | None = None
    better: bool | None = None


def compare(before: Machine, after: Machine) -> list[Change]:
    """Return the differences between two machine files; empty if nothing has changed.

    First come removed and new hosts, then versions and hardware, then figures that changed by more
    than their noise, the largest change first. Machines that have not changed differ in at most
    ``FALSE_CHANGE_LEVEL`` of comparisons.
    """
    found = []
    then, now = ({host.name: host for host in machine.hosts} for machine in (before, after))
    for name in [name for name in then if name not in now]:
        why = after.unreachable.get(name)
        sentence = f"{name} is gone" if why is None else f"{name} can't be reached any more: {why}"
        found.append(Change((name,), "host", "there", "gone", sentence))
    new = [name for name in now if name not in then]
    found += [Change((name,), "host", "none", "there", f"{name} is new") for name in new]
    found += _facts([(then[name], now[name]) for name in then if name in now])
    return [*found, *sorted(_figures(before, after), key=lambda change: -_moved(change.by or 0.0))]


def _moved(by: float) -> float:
    """Return the size of a change: half as fast counts as much as twice as fast."""
    return max(1 + by, 1 / (1 + by)) if by > -1 else float("inf")


def _facts(hosts: list[tuple[HostFacts, HostFacts]]) -> list[Change]:
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for then, now in hosts:
        old, new = dict(_named_changes(then)), dict(_named_changes(now))
        for what in dict.fromkeys([*old, *new]):
            pair = old.get(what, "none"), new.get(what, "none")
            if pair[0] != pair[1]:
                found[what, *pair].append(then.name)
    changes = []
    for (what, one, other), names in found.items():
        sentence = f"{what} was {one} and is {other} on {join_words(names)}"
        changes.append(Change(tuple(names), what, one, other, sentence))
    return changes


def _named_changes(host: HostFacts) -> Iterator[tuple[str, str]]:
    """Yield the properties of a host that should not change; what is currently free is left out."""
    yield from host.versions.items()
    yield "processor", host.processor or "not known"
    yield from ((what, str(count)) for what, count in host.counts.items())
    yield "GPUs", join_words([gpu.name for gpu in host.gpus], most=16) or "none"
    yield "network", join_words([f"{n.name} {n.rate}".strip() for n in host.networks]) or "none"
    if host.memory_bytes is not None:
        yield "memory", size(host.memory_bytes)
    for name, value in asdict(host.limits).items():
        if value is not None and name != "shm_free_bytes":
            plain = "unlimited" if value == UNLIMITED else None
            name, is_size = name.removesuffix("_bytes"), name.endswith("_bytes")
            yield f"limit {name}", plain or (size(value) if is_size else str(value))


Pair = tuple[NamedFigure, NamedFigure]


def _figures(before: Machine, after: Machine) -> Iterator[Change]:
    then, now = (
        {
            (named.what, named.member, named.device, named.like): named
            for figures in (host_figures, group_figures, link_figures)
            for named in figures(machine)
        }
        for machine in (before, after)
    )
    pairs = [(old, now[key]) for key, old in then.items() if key in now]
    noise = _Noise(pairs)
    kinds: dict[tuple[str, str, str], list[Pair]] = defaultdict(list)
    for old, new in pairs:
        kinds[old.what, old.device.partition(":")[0], old.like].append((old, new))
    for of_kind in kinds.values():
        changed = [pair for pair in of_kind if _real(*pair, noise)]
        for up in (True, False):
            same = [p for p in changed if (p[1].figure.median > p[0].figure.median) == up]
            if len(same) > 2 and len(same) > _MOST * len(of_kind):
                yield _together(same, len(of_kind))
            else:
                yield from (_change(old, new) for old, new in same)


class _Noise:
    """By how much figures of an unchanged machine differ by chance.

    Args:
        pairs: All figures that are compared, before and after.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._tail = FALSE_CHANGE_LEVEL / (2 * max(len(pairs), 1))
        sorts: dict[tuple[str, str, float], list[float]] = defaultdict(list)
        for pair in pairs:
            sorts[_sort(pair[0])] += [_variance(named.figure) for named in pair]
        self._variances = {sort: median(found) for sort, found in sorts.items()}

    def limit(self, old: NamedFigure, new: NamedFigure) -> float:
        """Return the absolute logarithm of after / before that chance exceeds with the tail."""
        of_sort = self._variances[_sort(old)]
        variance, known = 0.0, 0.0
        for figure in (old.figure, new.figure):
            degrees = _degrees(figure)
            weighted = degrees * _variance(figure) + _SAME_SORT_DEGREES * of_sort
            of_figure = weighted / (degrees + _SAME_SORT_DEGREES)
            variance += of_figure * (1 + MEDIAN_VARIANCE / figure.n)
            known += degrees
        measured = student_quantile(self._tail, int(known) + _SAME_SORT_DEGREES) ** 2 * variance
        assumed = student_quantile(self._tail, MAX_DEGREES) ** 2 * 2 * EQUAL_MEMBERS**2
        return math.sqrt(measured + assumed)


def _sort(named: NamedFigure) -> tuple[str, str, float]:
    """Return what figures share that are measured alike: bandwidths of collectives, for example."""
    return named.figure.unit, named.device.partition(":")[0], named.worth


def _variance(figure: Figure) -> float:
    """Return the variance of one repetition, relative to the median."""
    return (deviation(figure) / figure.median) ** 2 if figure.median else 0.0


def _degrees(figure: Figure) -> float:
    least, each = _QUARTILE_DEGREES
    return max(least, each * (figure.n - 1)) if figure.n >= MIN_REPETITIONS else 0.0


def _real(old: NamedFigure, new: NamedFigure, noise: _Noise) -> bool:
    """Whether the change exceeds the noise, both spreads, and the smallest relevant difference."""
    before, after = old.figure.median, new.figure.median
    gap = abs(after - before)
    if gap <= max(old.figure.spread, new.figure.spread, old.worth * before):
        return False
    return not before or not after or abs(math.log(after / before)) > noise.limit(old, new)


def _change(old: NamedFigure, new: NamedFigure) -> Change:
    whose = f" of {old.member}" if old.hosts else ""
    kind = "of the link " if len(old.hosts) > 1 else ""
    what = f"{old.what} {kind}".strip()
    return _of(old, what, old.hosts, f"{what}{whose}", (old.figure.median, new.figure.median))


def _together(pairs: list[tuple[NamedFigure, NamedFigure]], count: int) -> Change:
    """Report a change in the same direction on most hosts, links or devices."""
    first = pairs[0][0]
    ends = [tuple(median(pair[i].figure.median for pair in pairs) for i in (0, 1))]
    hosts = tuple(dict.fromkeys(host for old, _ in pairs for host in old.hosts))
    kind = "links" if len(first.hosts) > 1 else "devices" if ":" in first.device else "hosts"
    number = f"all {count}" if len(pairs) == count else f"{len(pairs)} of {count}"
    return _of(first, first.what, hosts, f"{first.what} of {number} {kind}", ends[0])


def _of(
    named: NamedFigure, what: str, hosts: tuple[str, ...], whose: str, values: tuple[float, ...]
) -> Change:
    old, new = values
    by = new / old - 1 if old else float("inf")
    better = (new > old) == named.more_is_better
    before, after = format_value(old, named.figure.unit), format_value(new, named.figure.unit)
    sentence = f"{whose} was {before} and is {after} ({100 * by:+.0f} %): "
    sentence += "better" if better else "worse"
    return Change(hosts, what, before, after, sentence, by, better)
