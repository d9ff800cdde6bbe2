"""The hosts of an Open MPI 4 start, from the environment that its daemons pass to the ranks."""

import re

from .env_numbers import Environment, number
from .hostlist import expand_numbers, split_hostlist

WITHOUT_DAEMON = (
    0xFFFFFFFF  # daemon number on a host of the allocation that this start does not use
)


def hosts(environment: Environment) -> list[str]:
    """Return the names of the hosts, then the addresses of the host that runs mpirun.

    The name of mpirun's host is the last name if no rank runs on it.
    """
    names = in_regex(environment.get("OMPI_MCA_orte_node_regex", ""))
    used = number(environment, "OMPI_MCA_orte_num_nodes")
    if used is not None and used < len(names):
        names = names[1:] + names[:1]
    return list(dict.fromkeys(names + _addresses(environment)))


def in_regex(text: str) -> list[str]:
    """Expand Open MPI's node regex, such as "host[1:0-2],login@0(4)".

    The parts are a prefix, the number of digits and the numbers; after the @, the numbers of the
    daemons in the order of the names. Return an empty list if it cannot be parsed.
    """
    nodes, _, daemons = text.rpartition("@")
    try:
        names = [name for part in split_hostlist(nodes) for name in _names(part)]
    except ValueError:
        return []
    ids = _daemons(daemons)
    if len(ids) != len(names):
        return names
    return [name for name, daemon in zip(names, ids, strict=True) if daemon != WITHOUT_DAEMON]


def _names(part: str) -> list[str]:
    match = re.fullmatch(r"([^\[\]]*)\[(\d+):([^\]]*)\]([^\[\]]*)", part)
    if match is None:
        return [part]
    prefix, digits, which, suffix = match.groups()
    return [f"{prefix}{n.zfill(int(digits))}{suffix}" for n in expand_numbers(which)]


def _daemons(text: str) -> list[int]:
    """Expand daemon numbers such as "0(2),4294967295(1)": the first number and a count."""
    found: list[int] = []
    for first, count in re.findall(r"(\d+)(?:\((\d+)\))?", text):
        if int(first) == WITHOUT_DAEMON:
            found += [WITHOUT_DAEMON] * int(count or 1)
        else:
            found += range(int(first), int(first) + int(count or 1))
    return found


def _addresses(environment: Environment) -> list[str]:
    found: list[str] = []
    for name in ("OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_parent_uri"):
        for group in re.findall(r"tcp6?://([^;]+):\d+", environment.get(name, "")):
            found += [address.strip("[]") for address in group.split(",")]
    return [address for address in found if not address.startswith("127.") and address != "::1"]
