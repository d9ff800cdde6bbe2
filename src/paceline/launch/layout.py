"""The placement of ranks on hosts: the ranks of a host are consecutive."""

from dataclasses import dataclass

from ..cluster.schedulers.hostfile import Host
from ..cluster.topology.local_resources import spans


@dataclass(frozen=True)
class Seat:
    """Where one rank runs.

    Attributes:
        host: Index in the list of hosts.
        local_rank: Rank among the ranks of the host.
        local_size: Number of ranks on the host.
    """

    host: int
    local_rank: int
    local_size: int


def seats(counts: list[int]) -> list[Seat]:
    """Return the seat of each rank, in rank order, given the number of ranks on each host."""
    return [Seat(host, local, count) for host, count in enumerate(counts) for local in range(count)]


def counts(hosts: list[Host], ranks: int | None, explicit: bool) -> list[int]:
    """Ranks of each host.

    hosts: with the slots, devices and numa that are known. explicit: the slots are the user's
    own (-H host:4), and come before what the hosts have. Without ``ranks`` each host gets its
    share: its GPUs, else the scheduler's tasks, else its NUMA domains. With ``ranks`` explicit
    slots are filled in order; else the ranks are spread evenly. Hosts that get none have 0.

    Raises ValueError for fewer than one rank, or more than there are explicit slots.
    """
    if ranks is not None and ranks < 1:
        raise ValueError(f"-n {ranks}: at least one rank is needed. HINT: -n 1")
    if explicit and all(host.slots is not None for host in hosts):
        slots = [host.slots or 0 for host in hosts]
        return slots if ranks is None else _filled(slots, ranks, hosts)
    if ranks is None:
        return [share(host) for host in hosts]
    each, left = divmod(ranks, len(hosts))
    return [each + (place < left) for place in range(len(hosts))]


def share(host: Host) -> int:
    """Return the default number of ranks of a host."""
    return host.devices or host.slots or host.numa or 1


def _filled(slots: list[int], ranks: int, hosts: list[Host]) -> list[int]:
    if ranks > sum(slots):
        had = ", ".join(f"{host.name}:{host.slots}" for host in hosts[:8])
        raise ValueError(
            f"-n {ranks}: {ranks} ranks for {sum(slots)} slots ({had}"
            f"{', ...' if len(hosts) > 8 else ''}). HINT: -n {sum(slots)}, or more slots a host"
        )
    found = []
    for count in slots:
        found.append(min(count, ranks))
        ranks -= found[-1]
    return found


def told(names: list[str], counted: list[int]) -> str:
    """ "host1: 0-3, host2: 4-7", shortened in the middle for many hosts."""
    parts, first = [], 0
    for name, count in zip(names, counted, strict=True):
        if count:
            parts.append(f"{name}: {spans(list(range(first, first + count)))}")
        first += count
    if len(parts) > 8:
        parts = [*parts[:4], f"... {len(parts) - 6} more ...", *parts[-2:]]
    return ", ".join(parts)
