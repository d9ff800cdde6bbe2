"""Find hosts or GPUs that compute, read or communicate slower than their peers."""

from collections import defaultdict

from ...plurals import counted
from ..machine.machine_file import Machine
from ..machine.named_figures import NamedFigure, host_figures
from ..machine.units import format_value, join_words
from .outlier import Outlier
from .slower_than_peers import SlowerFigure, differ, find_slower


def find_slow_hosts(machine: Machine) -> list[Outlier]:
    """Return hosts that are slower than their peers by more than the spread.

    Each GPU is compared with all GPUs of its kind.
    """
    kinds: dict[tuple[str, str, str], list[NamedFigure]] = defaultdict(list)
    for named in host_figures(machine):
        kinds[named.what, named.device.partition(":")[0], named.like].append(named)
    found = []
    for members in kinds.values():
        names = {named.hosts[0] for named in members}
        if len(members) == 2:
            pair = differ(members)
            found += [_pair_outlier(pair, members)] if pair is not None else []
            continue
        worse: dict[str, list[SlowerFigure]] = defaultdict(list)
        for one in find_slower(members):
            worse[one.named.hosts[0]].append(one)
        for host, ones in worse.items():
            whole = len(ones) == sum(named.hosts[0] == host for named in members)
            if whole and len(names) == 2:
                found.append(_pair_outlier(ones[0], members))
            elif whole and len(ones) > 1:
                found.append(_host_outlier(ones, members))
            else:
                found += [_single_outlier(each, members) for each in ones]
    return found


def _single_outlier(worse: SlowerFigure, members: list[NamedFigure]) -> Outlier:
    named, unit = worse.named, worse.named.figure.unit
    value, peers = format_value(named.figure.median, unit), format_value(worse.peers, unit)
    part = "processors" if named.device == "cpu" else named.device
    whose = f"{named.what} of its {part}" if part else named.what
    who = _describe_peers({one.hosts[0] for one in members} - set(named.hosts), members)
    sentence = f"{named.hosts[0]} is slow: {whose} is {value}, that of {who} {peers}"
    return Outlier("slow", named.hosts, named.what, value, peers, sentence, worse.by)


def _host_outlier(ones: list[SlowerFigure], members: list[NamedFigure]) -> Outlier:
    """Report a host all of whose devices are slow."""
    first = ones[0]
    unit, host = first.named.figure.unit, first.named.hosts[0]
    value, peers = format_value(first.named.figure.median, unit), format_value(first.peers, unit)
    who = _describe_peers({one.hosts[0] for one in members} - {host}, members)
    sentence = (
        f"{host} is slow: {first.named.what} of all its {counted(len(ones), 'GPU')} is {value} at "
        f"worst, that of {who} {peers}"
    )
    return Outlier("slow", (host,), first.named.what, value, peers, sentence, first.by)


def _pair_outlier(worse: SlowerFigure, members: list[NamedFigure]) -> Outlier:
    """Report two members that differ: it is unknown which of them is the outlier."""
    unit, slow = worse.named.figure.unit, worse.named
    value, peers = format_value(slow.figure.median, unit), format_value(worse.peers, unit)
    both = tuple(dict.fromkeys(named.hosts[0] for named in members))
    other = next(named for named in members if named is not slow)
    if len(both) > 1:
        other = next(named for named in members if named.hosts != slow.hosts)
    names = (slow.hosts[0], other.hosts[0]) if len(both) > 1 else (slow.member, other.member)
    sentence = (
        f"{names[0]} and {names[1]} differ: {slow.what} is {value} and {peers}; with only "
        "two it is unknown which one is the outlier"
    )
    return Outlier("slow", both, slow.what, value, peers, sentence, worse.by)


def _describe_peers(others: set[str], members: list[NamedFigure]) -> str:
    if not others:
        return "its other devices"
    if any(":" in named.device for named in members):
        return "the others"
    return join_words(sorted(others)) if len(others) < 4 else f"the {len(others)} others"
