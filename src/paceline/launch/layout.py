"""Placement of ranks on hosts. The ranks of a host are consecutive."""

from dataclasses import dataclass

from ..cluster.schedulers.hostfile import Host
from ..plurals import counted, format_ranges


@dataclass(frozen=True)
class Seat:
    """Where one rank runs.

    Attributes:
        host: Index of the host in the list of hosts.
        local_rank: Local rank on the host.
        local_size: Number of ranks on the host.
    """

    host: int
    local_rank: int
    local_size: int


def make_seats(counts: list[int]) -> list[Seat]:
    """Return the seat of each rank, in rank order, given the number of ranks on each host."""
    return [Seat(host, local, count) for host, count in enumerate(counts) for local in range(count)]


def ranks_per_host(hosts: list[Host], ranks: int | None, explicit: bool) -> list[int]:
    """Return the number of ranks on each host; 0 for a host without ranks.

    If ``ranks`` is None, each host gets its default number of ranks: the number of its GPUs, else
    of the scheduler's tasks, else of its NUMA domains. Otherwise explicit slots are filled in the
    order of the hosts; without explicit slots the ranks are distributed evenly.

    Args:
        hosts: The hosts, with the slots, devices and NUMA domains that are known.
        ranks: World size, or None.
        explicit: Whether the user has given the slots (``-H host:4``). They then take precedence
            over the hardware of the hosts.

    Raises:
        ValueError: ``ranks`` is less than 1, or more than the explicit slots.
    """
    if ranks is not None and ranks < 1:
        raise ValueError(f"-n {ranks}: at least one rank is needed. HINT: -n 1")
    if explicit and all(host.slots is not None for host in hosts):
        slots = [host.slots or 0 for host in hosts]
        return slots if ranks is None else _filled(slots, ranks, hosts)
    if ranks is None:
        return [default_ranks(host) for host in hosts]
    each, left = divmod(ranks, len(hosts))
    return [each + (place < left) for place in range(len(hosts))]


def default_ranks(host: Host) -> int:
    """Return the default number of ranks of a host."""
    return host.devices or host.slots or host.numa or 1


def explain_default_ranks(host: Host, cores: int) -> str:
    """Return a message about the ranks that are started on this host by default.

    Return "" if nothing on the host is left for more ranks.

    Args:
        host: This host, outside of an allocation.
        cores: Number of its cores that ranks may use.
    """
    count = default_ranks(host)
    if host.devices or count >= cores:
        return ""
    started = (
        f"{count} ranks are started, one per NUMA domain," if count > 1 else "1 rank is started"
    )
    return (
        f"paceline: {started} on this machine, which has {cores} cores. "
        f"HINT: -n {cores} starts one rank per core, -n {count} hides this line\n"
    )


def _filled(slots: list[int], ranks: int, hosts: list[Host]) -> list[int]:
    if ranks > sum(slots):
        had = ", ".join(f"{host.name}:{host.slots}" for host in hosts[:8])
        raise ValueError(
            f"-n {ranks}: {counted(ranks, 'rank')} need as many slots, and the nodes have "
            f"{counted(sum(slots), 'slot')} ({had}"
            f"{', ...' if len(hosts) > 8 else ''}). HINT: -n {sum(slots)}, or more slots per host"
        )
    found = []
    for count in slots:
        found.append(min(count, ranks))
        ranks -= found[-1]
    return found


def format_layout(names: list[str], counted: list[int]) -> str:
    """Return the ranks of each host as "host1: 0-3, host2: 4-7", abbreviated for many hosts."""
    parts, first = [], 0
    for name, count in zip(names, counted, strict=True):
        if count:
            parts.append(f"{name}: {format_ranges(list(range(first, first + count)))}")
        first += count
    if len(parts) > 8:
        parts = [*parts[:4], f"... {len(parts) - 6} more ...", *parts[-2:]]
    return ", ".join(parts)
