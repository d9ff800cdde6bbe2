"""The hosts of an Open MPI 4 start, as its daemons describe them to the ranks."""

import re

from .env_numbers import Environment, number
from .hostlist import numbers, split

NO_DAEMON = 0xFFFFFFFF  # on a host of the allocation that this start doesn't use


def hosts(environment: Environment) -> list[str]:
    """Names, then addresses of mpirun's own host; that comes last where it has no rank."""
    names = in_regex(environment.get("OMPI_MCA_orte_node_regex", ""))
    used = number(environment, "OMPI_MCA_orte_num_nodes")
    if used is not None and used < len(names):
        names = names[1:] + names[:1]
    return list(dict.fromkeys(names + _addresses(environment)))


def in_regex(text: str) -> list[str]:
    """ "host[1:0-2],login@0(4)": a prefix, how many digits, numbers; behind the @ the daemons'
    numbers, in the order of the names. Empty where it is not understood."""
    nodes, _, daemons = text.rpartition("@")
    try:
        names = [name for part in split(nodes) for name in _names(part)]
    except ValueError:
        return []
    ids = _daemons(daemons)
    if len(ids) != len(names):
        return names
    return [name for name, daemon in zip(names, ids, strict=True) if daemon != NO_DAEMON]


def _names(part: str) -> list[str]:
    match = re.fullmatch(r"([^\[\]]*)\[(\d+):([^\]]*)\]([^\[\]]*)", part)
    if match is None:
        return [part]
    prefix, digits, which, suffix = match.groups()
    return [f"{prefix}{n.zfill(int(digits))}{suffix}" for n in numbers(which)]


def _daemons(text: str) -> list[int]:
    """ "0(2),4294967295(1)": the first number and how many."""
    found: list[int] = []
    for first, count in re.findall(r"(\d+)(?:\((\d+)\))?", text):
        if int(first) == NO_DAEMON:
            found += [NO_DAEMON] * int(count or 1)
        else:
            found += range(int(first), int(first) + int(count or 1))
    return found


def _addresses(environment: Environment) -> list[str]:
    found: list[str] = []
    for name in ("OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_parent_uri"):
        for group in re.findall(r"tcp6?://([^;]+):\d+", environment.get(name, "")):
            found += [address.strip("[]") for address in group.split(",")]
    return [address for address in found if not address.startswith("127.") and address != "::1"]
