"""The cores and GPUs for trials that run side by side: this node, or those of the allocation.

A trial that fits on one node gets neighbouring cores and GPUs there. A larger one gets whole nodes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ...cluster.topology.local_resources import allowed_threads
from ...cluster.topology.topology import topology
from ...cluster.topology.visible_gpus import gpu_count
from ...launch.options import NodeOptions
from ...launch.target import find_target
from ...plurals import counted


@dataclass(frozen=True)
class Node:
    """One node. ``name`` is "" for this one."""

    name: str
    cores: int
    gpus: int = 0


@dataclass(frozen=True)
class Seat:
    """Where one trial runs.

    Attributes:
        nodes: Indices of its nodes.
        hosts: Value of -H; "" for this node.
        share: See ``Job.share``.
    """

    nodes: tuple[int, ...]
    hosts: str
    share: tuple[int, int, int, int]


class Machine:
    """The nodes, and which of their cores and GPUs are free.

    Args:
        nodes: The nodes.
        launcher: Tool that starts agents; None: the ranks run on this node.
        why: Where the nodes come from, for messages.
        cores_per_rank: Cores of each rank; None: one, or an equal part of the node for each GPU.
    """

    def __init__(
        self, nodes: list[Node], launcher: str | None, why: str, cores_per_rank: int | None = None
    ) -> None:
        self.nodes, self.launcher, self.why = nodes, launcher, why
        gpus = min(node.gpus for node in nodes)
        least = min(node.cores for node in nodes)
        self.uses_gpus = gpus > 0
        self.cores_per_rank = cores_per_rank or (max(least // gpus, 1) if gpus else 1)
        self._free = [set(range(self.slots(node))) for node in nodes]
        self._lost: set[int] = set()

    def slots(self, node: Node) -> int:
        """Return the number of ranks that fit on a node."""
        cores = node.cores // self.cores_per_rank
        return min(cores, node.gpus) if self.uses_gpus else cores

    @property
    def capacity(self) -> int:
        """Number of ranks that fit on all nodes that are not lost."""
        return sum(self.slots(one) for at, one in enumerate(self.nodes) if at not in self._lost)

    def leave_out(self, seat: Seat) -> str:
        """Use the node of a trial no longer, and return its name; "" if several may be meant."""
        if len(seat.nodes) > 1 or not seat.hosts:
            return ""
        self._lost.add(seat.nodes[0])
        self._free[seat.nodes[0]] = set()
        return self.nodes[seat.nodes[0]].name

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another rank."""
        return not any(self._free)

    def share_of_nodes(self, seat: Seat) -> float:
        """Return the number of nodes that a trial uses; of a node that it shares, its part."""
        if len(seat.nodes) > 1:
            return float(len(seat.nodes))
        return seat.share[1] / max(self.nodes[seat.nodes[0]].cores, 1)

    def check(self, ranks: int) -> None:
        """Raise ValueError if a trial of so many ranks does not fit."""
        if ranks > self.capacity:
            cores = sum(node.cores for node in self.nodes)
            each = f" of {counted(self.cores_per_rank, 'core')} each" * (self.cores_per_rank > 1)
            gpus = ", one for each GPU" if self.uses_gpus else ""
            raise ValueError(
                f"a trial of {counted(ranks, 'rank')}{each} does not fit: there is room for "
                f"{counted(self.capacity, 'rank')}{gpus} on {counted(cores, 'core')} ({self.why}). "
                f"HINT: study.ranks = {max(self.capacity, 1)}, or study.cores"
            )

    def take(self, ranks: int) -> Seat | None:
        """Reserve cores and GPUs for a trial; None if there are not enough of them now."""
        for number, free in enumerate(self._free):
            for first in _runs(free, ranks):
                free -= set(range(first, first + ranks))
                name = self.nodes[number].name
                return Seat((number,), f"{name}:{ranks}" if name else "", self._share(first, ranks))
        whole = [
            number
            for number, free in enumerate(self._free)
            if len(free) == self.slots(self.nodes[number]) and number not in self._lost
        ]
        chosen, hosts, left = [], [], ranks
        for number in whole:
            here = min(self.slots(self.nodes[number]), left)
            chosen.append(number)
            hosts.append(f"{self.nodes[number].name}:{here}")
            left -= here
            if not left:
                break
        if left or len(chosen) < 2:
            return None
        for number in chosen:
            self._free[number] = set()
        most = min(self.slots(self.nodes[number]) for number in chosen)
        return Seat(tuple(chosen), ",".join(hosts), self._share(0, most))

    def give_back(self, seat: Seat) -> None:
        """Free what ``take`` reserved."""
        first = seat.share[0] // self.cores_per_rank
        for number in set(seat.nodes) - self._lost:
            count = seat.share[1] // self.cores_per_rank
            if len(seat.nodes) > 1:
                first, count = 0, self.slots(self.nodes[number])
            self._free[number] |= set(range(first, first + count))

    def _share(self, first: int, ranks: int) -> tuple[int, int, int, int]:
        cores = first * self.cores_per_rank, ranks * self.cores_per_rank
        return (*cores, first, ranks) if self.uses_gpus else (*cores, 0, 0)


def _runs(free: set[int], length: int) -> Iterator[int]:
    """Yield the beginnings of runs of free slots."""
    for first in sorted(free):
        if all(first + offset in free for offset in range(length)):
            yield first


def find_machine(nodes: NodeOptions, cores_per_rank: int | None) -> Machine:
    """Return the nodes that the options or the allocation determine, as for ``paceline run``.

    Raises:
        ValueError: Same as for ``find_target``; or the cores of a node are not known.
    """
    target = find_target(nodes)
    if target.tool is None:
        cores = len(topology().cores(allowed_threads()))
        return Machine([Node("", cores, gpu_count())], None, target.why, cores_per_rank)
    if not target.tool.accepts_host_names:
        raise ValueError(
            f"{target.tool.name} uses all nodes of its allocation for one job, so trials can't run "
            "side by side. HINT: --launcher ssh or srun"
        )
    found = []
    for host in target.hosts:
        cores_here = host.slots if target.explicit else host.cpus or host.slots
        if cores_here is None:
            raise ValueError(
                f"the number of cores of {host.name} is not known ({target.why}). HINT: -H "
                f"{host.name}:N"
            )
        found.append(Node(host.name, cores_here, host.devices or 0))
    return Machine(found, nodes.launcher or target.tool.name, target.why, cores_per_rank)
