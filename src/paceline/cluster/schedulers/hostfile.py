"""Hosts that the user names: the option -H, and hostfiles of the common launchers."""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .env_numbers import is_number

NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_.])?")
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\$?")


@dataclass(frozen=True)
class Host:
    """A host and its resources; None where a number is unknown.

    Attributes:
        slots: Number of ranks to start on it.
        devices: Number of GPUs.
        cpus: Number of CPUs as the scheduler counts them: cores, or hardware threads.
        numa: Number of NUMA domains.
    """

    name: str
    slots: int | None = None
    devices: int | None = None
    cpus: int | None = None
    numa: int | None = None


def parse_hosts(text: str) -> list[Host]:
    """Parse the hosts of -H, such as "host1:4,host2,user@host3:2,[::1]:4".

    The slots of a host that is named several times are added.

    Raises:
        ValueError: A host is not valid.
    """
    parts = [part.strip() for part in text.split(",")]
    if "" in parts:
        raise ValueError(f"-H {text!r}: a host name is empty. HINT: -H host1:4,host2:4")
    try:
        return merge(_host(part) for part in parts)
    except ValueError as mistake:
        raise ValueError(f"-H {text!r}: {mistake}") from None


def read_hostfile(path: str | Path) -> list[Host]:
    """Read a hostfile: one host per line, as "host1", "host1:4" or "host1 slots=4".

    "#" begins a comment.

    Raises:
        ValueError: The file cannot be read, a line is not valid, or no line names a host.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ValueError(
            f"the hostfile {path} can't be read: {error.strerror}. "
            "HINT: name a file: --hostfile hosts.txt"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(
            f"the hostfile {path} is not text. HINT: write one host per line"
        ) from None
    hosts = []
    for count, line in enumerate(lines, start=1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if not words:
            continue
        try:
            hosts.append(_line(words))
        except ValueError as mistake:
            raise ValueError(f"{path}, line {count}: {line.strip()!r}: {mistake}") from None
    if not hosts:
        raise ValueError(
            f"the hostfile {path} names no host. HINT: write one host per line, such as host1:4"
        )
    return merge(hosts)


def merge(hosts: Iterable[Host]) -> list[Host]:
    """Return each host once, in the order of first mention.

    The slots of a host that is named several times are added. A mention without a number then
    counts as one slot, as in mpirun and in the schedulers' files.
    """
    mentions: dict[str, list[int | None]] = {}
    for host in hosts:
        mentions.setdefault(host.name, []).append(host.slots)
    return [
        Host(name, slots[0] if len(slots) == 1 else sum(1 if n is None else n for n in slots))
        for name, slots in mentions.items()
    ]


def _line(words: list[str]) -> Host:
    host = _host(words[0])
    slots = host.slots
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in ("slots", "max_slots", "max-slots"):
            raise ValueError(f"{word!r} is not understood. HINT: host1 slots=4, or host1:4")
        count = _slots(value)
        if key == "slots":
            if slots is not None:
                raise ValueError("the slots are given twice. HINT: host1 slots=4, or host1:4")
            slots = count
    return Host(host.name, slots)


def _host(text: str) -> Host:
    """Parse one word: [user@]name[:slots]."""
    if text.startswith("-"):
        raise ValueError(f"{text!r} looks like an option. HINT: give a host name, such as host1:4")
    user, at, rest = text.rpartition("@")
    if at and not USER.fullmatch(user):
        raise ValueError(f"{user!r} is not a user name. HINT: user@host1:4")
    if rest.startswith("["):
        name, bracket, tail = rest[1:].partition("]")
        if not bracket or not _is_ipv6(name) or (tail and not tail.startswith(":")):
            raise ValueError(f"{rest!r} is not an IPv6 address. HINT: write it as in [fe80::1]:4")
        slots = tail[1:] if tail else None
    else:
        if rest.count(":") > 1:
            raise ValueError(
                f"{rest!r} has several colons. HINT: write an IPv6 address in brackets: [::1]:4"
            )
        name, colon, tail = rest.partition(":")
        slots = tail if colon else None
        if not NAME.fullmatch(name):
            what = f"{name!r} is not a host name" if name else "a host name is empty"
            raise ValueError(
                f"{what}. HINT: use letters, digits, '.', '-' and '_', such as host1:4"
            )
    return Host(user + at + name, None if slots is None else _slots(slots))


def _slots(text: str) -> int:
    if not is_number(text) or int(text) == 0:
        raise ValueError(f"{text!r} slots are not a number above 0. HINT: host1:4")
    return int(text)


def _is_ipv6(text: str) -> bool:
    address, percent, interface = text.partition("%")
    if percent and not NAME.fullmatch(interface):
        return False
    try:
        return bool(ipaddress.IPv6Address(address))
    except ValueError:
        return False
