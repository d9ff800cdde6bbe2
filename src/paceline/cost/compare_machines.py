"""Compare two machine files of one machine, for example before and after a maintenance."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median

from .machine.machine_file import UNLIMITED, HostFacts, Machine
from .machine.named_figures import (
    NamedFigure,
    group_figures,
    host_figures,
    link_figures,
    typical_deviation,
)
from .machine.units import format_value, join_words, size
from .outliers.slower_than_peers import MIN_DEVIATIONS

_MOST = 0.5  # share of the hosts above which a common change is reported once


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
    than both their spreads, the largest change first.
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
    return [*found, *sorted(_figures(before, after), key=lambda one: -_moved(one.by or 0.0))]


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
    for what, count in (
        ("sockets", host.sockets),
        ("cores", host.cores),
        ("hardware threads", host.threads),
        ("NUMA nodes", host.numa_nodes),
    ):
        if count is not None:
            yield what, str(count)
    yield "GPUs", join_words([gpu.name for gpu in host.gpus], most=16) or "none"
    yield "network", join_words([f"{n.name} {n.rate}".strip() for n in host.networks]) or "none"
    if host.memory_bytes is not None:
        yield "memory", size(host.memory_bytes)
    for name, value in asdict(host.limits).items():
        if value is not None and name != "shm_free_bytes":
            plain = "unlimited" if value == UNLIMITED else None
            name, is_size = name.removesuffix("_bytes"), name.endswith("_bytes")
            yield f"limit {name}", plain or (size(value) if is_size else str(value))


def _figures(before: Machine, after: Machine) -> Iterator[Change]:
    kinds: dict[tuple[str, str, str], list[tuple[NamedFigure, NamedFigure]]] = defaultdict(list)
    then, now = (
        {(n.what, n.member, n.device, n.like): n for n in _all(machine)}
        for machine in (before, after)
    )
    for key, old in then.items():
        if key in now:
            kinds[old.what, old.device.partition(":")[0], old.like].append((old, now[key]))
    for pairs in kinds.values():
        noise = MIN_DEVIATIONS * typical_deviation(
            [named.figure for pair in pairs for named in pair]
        )
        changed = [pair for pair in pairs if _real(*pair, noise)]
        for up in (True, False):
            same = [p for p in changed if (p[1].figure.median > p[0].figure.median) == up]
            if len(same) > 2 and len(same) > _MOST * len(pairs):
                yield _together(same, len(pairs))
            else:
                yield from (_change(old, new) for old, new in same)


def _all(machine: Machine) -> list[NamedFigure]:
    return [*host_figures(machine), *group_figures(machine), *link_figures(machine)]


def _real(old: NamedFigure, new: NamedFigure, noise: float) -> bool:
    """Whether the change exceeds both spreads and the smallest relevant difference."""
    gap = abs(new.figure.median - old.figure.median)
    most = max(old.figure.spread, new.figure.spread, noise)
    return gap > most and gap > old.worth * old.figure.median


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
