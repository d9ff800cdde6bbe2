"""Division of a host's cores among its ranks.

It is even over sockets and NUMA nodes, and gives adjacent cores to the same rank.
No rank gets cores of two sockets or NUMA nodes, unless there are too few ranks or the nodes are too
small.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..topology.topology import Cpu, Topology

# If there are fewer ranks than NUMA nodes (sockets), a rank gets several of them only if this
# gives it more cores by at least this factor. With two ranks and three nodes, one node per rank
# is better than two ranks that share a node.
MIN_GAIN = 1.5

Core = tuple[Cpu, ...]  # its hardware threads, as far as they may be used


@dataclass(frozen=True)
class Group:
    """Cores of a host, a socket or a NUMA node, with the smaller groups that it consists of."""

    cores: tuple[Core, ...]
    parts: tuple["Group", ...] = ()

    def fits(self, each: int) -> int:
        """Return how many ranks of ``each`` cores fit if none spans two of the smallest groups."""
        if not self.parts:
            return len(self.cores) // each
        return sum(part.fits(each) for part in self.parts)


def allowed_cores(topology: Topology, allowed: Iterable[int], smt: bool | None) -> list[Core]:
    """Return the cores that have an allowed hardware thread.

    Each core lists its allowed hardware threads; with ``smt=False`` only the first one.
    """
    found: dict[int, list[Cpu]] = {}
    for cpu in topology.at(allowed):
        found.setdefault(cpu.core, []).append(cpu)
    return [tuple(cpus[:1] if smt is False else cpus) for cpus in found.values()]


def group_by_socket(cores: Iterable[Core]) -> Group:
    """Return the cores grouped by socket and NUMA node, sorted, with efficiency cores last."""
    packages: dict[int, dict[int, list[Core]]] = {}
    for core in cores:
        first = core[0]
        node = -1 if first.node is None else first.node
        packages.setdefault(first.package, {}).setdefault(node, []).append(core)
    sockets = []
    for _, package in sorted(packages.items(), key=lambda entry: (min(entry[1]), entry[0])):
        nodes = [
            Group(tuple(sorted(package[node], key=lambda core: (core[0].efficient, core[0].core))))
            for node in sorted(package)
        ]
        sockets.append(_join_groups(nodes))
    return _join_groups(sockets)


def _join_groups(parts: Sequence[Group]) -> Group:
    return Group(tuple(core for part in parts for core in part.cores), tuple(parts))


def cores_per_rank(host: Group, ranks: int) -> int:
    """Return how many cores each rank gets; 0 if there are fewer cores than ranks."""
    nodes = [node for socket in host.parts for node in socket.parts]
    each = _max_cores_per_rank(nodes, ranks)
    for smaller, larger in ((nodes, host.parts), (host.parts, (host,))):
        spread = _max_cores_per_rank(larger, ranks)
        if ranks < len(smaller) and spread > MIN_GAIN * each:
            each = spread
    return each


def _max_cores_per_rank(groups: Sequence[Group], ranks: int) -> int:
    """Return the largest number of cores of a single group that every rank can have exclusively."""
    sizes = [len(group.cores) for group in groups]
    for each in range(max(sizes, default=0), 0, -1):
        if sum(size // each for size in sizes) >= ranks:
            return each
    return 0


def ranks_per_part(group: Group, ranks: int, each: int) -> list[int] | None:
    """Return how many ranks each part gets, in proportion to its cores.

    ``each``: cores per rank. None if a rank would have to span two parts.
    """
    rooms = [part.fits(each) for part in group.parts]
    if sum(rooms) < ranks:
        return None
    return _distribute(group, rooms, ranks)


def _distribute(group: Group, rooms: list[int], ranks: int) -> list[int]:
    sizes = [len(part.cores) for part in group.parts]
    counts = [0] * len(rooms)
    for _ in range(ranks):
        free = [i for i, room in enumerate(rooms) if counts[i] < room]
        counts[max(free, key=lambda i: (sizes[i] / (counts[i] + 1), -counts[i], -i))] += 1
    return counts


def assign_cores(group: Group, ranks: int, each: int) -> list[tuple[Core, ...]]:
    """Return ``each`` cores for every rank: of one NUMA node if possible, else of one socket.

    The group must have enough cores. The result is in the order of the group's cores.
    """
    if not group.parts:
        return [group.cores[i * each : (i + 1) * each] for i in range(ranks)]
    counts = ranks_per_part(group, ranks, each)
    if counts is None:
        rooms = [len(part.cores) // each for part in group.parts]
        counts = _distribute(group, rooms, min(ranks, sum(rooms)))
    found = [
        block
        for part, count in zip(group.parts, counts, strict=True)
        for block in assign_cores(part, count, each)
    ]
    taken = {core for block in found for core in block}
    rest = tuple(core for core in group.cores if core not in taken)
    found += assign_cores(Group(rest), ranks - len(found), each)
    order = {core: i for i, core in enumerate(group.cores)}
    return sorted(found, key=lambda block: order[block[0]])


def assign_groups(group: Group, ranks: int, each: int) -> list[Group] | None:
    """Return one of the smallest groups for every rank, or None if they have too few cores."""
    if not group.parts:
        return [group] * ranks
    counts = ranks_per_part(group, ranks, each)
    if counts is None:
        return None
    found: list[Group] = []
    for part, count in zip(group.parts, counts, strict=True):
        found += assign_groups(part, count, each) or []
    return found
