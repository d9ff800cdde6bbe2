"""Find hosts or GPUs that compute, read or communicate slower than their peers."""

from collections import defaultdict

from ..machine.machine_file import Machine
from ..machine.named_figures import Named, of_hosts
from ..machine.units import listed, told
from .outlier import Odd
from .slower_than_peers import Worse, differ, slower


def hosts(machine: Machine) -> list[Odd]:
    """Return hosts that are slower than their peers by more than the spread.

    Each GPU is compared with all GPUs of its kind.
    """
    kinds: dict[tuple[str, str, str], list[Named]] = defaultdict(list)
    for named in of_hosts(machine):
        kinds[named.what, named.device.partition(":")[0], named.like].append(named)
    found = []
    for members in kinds.values():
        names = {named.hosts[0] for named in members}
        if len(members) == 2:
            pair = differ(members)
            found += [_two(pair, members)] if pair is not None else []
            continue
        worse: dict[str, list[Worse]] = defaultdict(list)
        for one in slower(members):
            worse[one.named.hosts[0]].append(one)
        for host, ones in worse.items():
            whole = len(ones) == sum(named.hosts[0] == host for named in members)
            if whole and len(names) == 2:
                found.append(_two(ones[0], members))
            elif whole and len(ones) > 1:
                found.append(_all_of(ones, members))
            else:
                found += [_one(each, members) for each in ones]
    return found


def _one(worse: Worse, members: list[Named]) -> Odd:
    named, unit = worse.named, worse.named.figure.unit
    value, peers = told(named.figure.median, unit), told(worse.peers, unit)
    part = "processors" if named.device == "cpu" else named.device
    whose = f"{named.what} of its {part}" if part else named.what
    who = _who({one.hosts[0] for one in members} - set(named.hosts), members)
    sentence = f"{named.hosts[0]} is slow: {whose} is {value}, that of {who} {peers}"
    return Odd("slow", named.hosts, named.what, value, peers, sentence, worse.by)


def _all_of(ones: list[Worse], members: list[Named]) -> Odd:
    """Report a host all of whose devices are slow."""
    first = ones[0]
    unit, host = first.named.figure.unit, first.named.hosts[0]
    value, peers = told(first.named.figure.median, unit), told(first.peers, unit)
    who = _who({one.hosts[0] for one in members} - {host}, members)
    sentence = (
        f"{host} is slow: {first.named.what} of all its {len(ones)} GPUs is {value} at worst, "
        f"that of {who} {peers}"
    )
    return Odd("slow", (host,), first.named.what, value, peers, sentence, first.by)


def _two(worse: Worse, members: list[Named]) -> Odd:
    """Report two members that differ: it is unknown which of them is the outlier."""
    unit, slow = worse.named.figure.unit, worse.named
    value, peers = told(slow.figure.median, unit), told(worse.peers, unit)
    both = tuple(dict.fromkeys(named.hosts[0] for named in members))
    other = next(named for named in members if named is not slow)
    if len(both) > 1:
        other = next(named for named in members if named.hosts != slow.hosts)
    names = (slow.hosts[0], other.hosts[0]) if len(both) > 1 else (slow.member, other.member)
    sentence = (
        f"{names[0]} and {names[1]} differ: {slow.what} is {value} and {peers}; with two nobody "
        "can say which of them is odd"
    )
    return Odd("slow", both, slow.what, value, peers, sentence, worse.by)


def _who(others: set[str], members: list[Named]) -> str:
    if not others:
        return "its others"
    if any(":" in named.device for named in members):
        return "the others"
    return listed(sorted(others)) if len(others) < 4 else f"the {len(others)} others"
