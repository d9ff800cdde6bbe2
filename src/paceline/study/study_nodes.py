"""The nodes on which a study runs: this one, named ones, or those of an allocation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..analyze.scaling.study_model import Setup
from ..cluster.topology.local_resources import allowed_threads
from ..cluster.topology.topology import topology
from ..launch.options import NodeOptions
from ..launch.target import Target, find_target
from ..plurals import counted


def _find_target(options: NodeOptions) -> Target:
    """Return the hosts as ``paceline run`` does; this one has no name, and its cores are known."""
    target = find_target(options)
    if target.tool is not None:
        return target
    (here,) = target.hosts
    cores = len(topology().cores(allowed_threads()))
    return replace(target, hosts=[replace(here, name="", cpus=cores)])


# Nodes of a scaling study.


@dataclass(frozen=True)
class StudyNodes:
    """Nodes for all sizes of a scaling study.

    Every size fills as few nodes as possible, in their order, so that all sizes share the first
    ones.

    Attributes:
        why: Where the hosts come from, for messages.
        slots: Ranks that each host can take; None where that is not known.
        cores: Cores of a host; None if that is not known.
        names: Names of the hosts, if sizes are placed by name.
        options: Options of ``paceline run`` besides the hosts' names.
        by_daemon: Whether a daemon of the scheduler starts the ranks.
    """

    why: str
    slots: tuple[int | None, ...]
    names: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    cores: int | None = None
    by_daemon: bool = False

    @property
    def capacity(self) -> int | None:
        """Number of ranks of the largest size; None if it is not known."""
        known = [slot for slot in self.slots if slot is not None]
        return sum(known) if len(known) == len(self.slots) else None

    def cores_of_rank(self, ranks_per_host: int) -> int | None:
        """Return the cores that each rank gets at every size, so that sizes can be compared.

        It is an equal part of a host that is full; None if that is not known.
        """
        return None if self.cores is None else max(self.cores // ranks_per_host, 1)

    def hosts_of(self, ranks: int) -> int:
        """Return the number of hosts that this number of ranks uses."""
        if not self.names:  # ``paceline run`` distributes the ranks over all hosts
            return min(ranks, len(self.slots))
        for hosts in range(1, len(self.slots)):
            first = self.slots[:hosts]
            if None not in first and sum(count or 0 for count in first) >= ranks:
                return hosts
        return len(self.slots)

    def where(self, ranks: int, first_host: int = 0) -> list[str]:
        """Return the options of ``paceline run`` that select the hosts of this number of ranks."""
        if not self.names:
            return list(self.options)
        hosts: list[str] = []
        left = ranks
        for name, slots in list(zip(self.names, self.slots, strict=True))[first_host:]:
            filled = min(left if slots is None else slots, left)
            hosts.append(f"{name}:{filled}")
            left -= filled
            if left <= 0:
                break
        return ["-H", ",".join(hosts), *self.options]


def side_by_side(setups: Sequence[Setup], nodes: StudyNodes) -> list[list[Setup]]:
    """Return groups of setups that can run at the same time, each on hosts of its own."""
    groups: list[list[Setup]] = []
    for setup in setups:
        taken = (
            sum(nodes.hosts_of(other.ranks) for other in groups[-1]) if groups else len(nodes.slots)
        )
        if nodes.names and taken + nodes.hosts_of(setup.ranks) <= len(nodes.slots):
            groups[-1].append(setup)
        else:
            groups.append([setup])
    return groups


def find_study_nodes(where: Sequence[str]) -> StudyNodes:
    """Return the nodes that stored options or the allocation determine, as for ``paceline run``.

    Raises:
        ValueError: Same as for ``find_target``.
    """
    stored = dict(zip(where[::2], where[1::2], strict=True))
    hostfile = stored.get("--hostfile")
    hosts, launcher = stored.get("-H"), stored.get("--launcher")
    target = _find_target(NodeOptions(hosts, Path(hostfile) if hostfile else None, launcher))
    given = ("--launcher", launcher) if launcher else ()
    if target.tool is None:
        (here,) = target.hosts
        return StudyNodes(target.why, (here.devices or here.cpus,), (), given, here.cpus)
    names, by_daemon = tuple(host.name for host in target.hosts), target.tool.by_daemon
    slots: tuple[int | None, ...] = tuple(host.slots for host in target.hosts)
    if target.explicit:
        if None in slots:
            typed = ("-H", hosts) if hosts else ("--hostfile", str(hostfile))
            return StudyNodes(target.why, slots, (), (*typed, *given), by_daemon=by_daemon)
        return StudyNodes(target.why, slots, names, given, by_daemon=by_daemon)
    slots = tuple(host.devices or host.cpus or host.slots for host in target.hosts)
    cpus = [host.cpus for host in target.hosts if host.cpus is not None]
    each = min(cpus) if len(cpus) == len(slots) else None
    if not target.tool.accepts_host_names or None in slots:
        return StudyNodes(target.why, slots, (), given, each, by_daemon)
    named = ("--launcher", launcher or target.tool.name)
    return StudyNodes(target.why, slots, names, named, each, by_daemon)


def check_side_by_side(nodes: StudyNodes) -> None:
    """Raise ValueError if sizes can't run at the same time, each on hosts of its own."""
    if len(nodes.names) < 2:
        one = f"the sizes would share one node ({nodes.why}), and disturb each other"
        several = f"the nodes of a size can't be chosen ({nodes.why})"
        raise ValueError(
            f"--side-by-side: {one if len(nodes.slots) < 2 else several}. HINT: leave it out, or "
            "name hosts with the ranks of each: -H host1:4,host2:4"
        )


def check_sizes(sizes: Sequence[int], nodes: StudyNodes) -> None:
    """Raise ValueError for sizes that the nodes have no cores or GPUs for."""
    capacity = nodes.capacity
    beyond = [size for size in sizes if capacity is not None and size > capacity]
    if not beyond:
        return
    fitting = [size for size in sizes if size not in beyond]
    hint = f"-n {','.join(map(str, fitting))}, " if fitting else ""
    raise ValueError(
        f"-n {','.join(map(str, beyond))}: there is room for {counted(capacity or 0, 'rank')} "
        f"({nodes.why}), one for each core or GPU. HINT: {hint}--submit for jobs of a scheduler, "
        "or --oversubscribe to share cores, which measures something else"
    )


# Nodes of a study of ``paceline tune``, whose trials run side by side.


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


class TrialNodes:
    """The nodes of a study of ``tune``, and which of their cores and GPUs are free.

    A trial that fits on one node gets neighbouring cores and GPUs there. A larger one gets whole
    nodes.

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
        return sum(self.slots(node) for at, node in enumerate(self.nodes) if at not in self._lost)

    def leave_out(self, seat: Seat) -> str:
        """Stop using the node of a trial; return its name, or "" if it had several nodes."""
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
        """Raise ValueError if a trial with this number of ranks does not fit."""
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
            filled = min(self.slots(self.nodes[number]), left)
            chosen.append(number)
            hosts.append(f"{self.nodes[number].name}:{filled}")
            left -= filled
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


def find_trial_nodes(options: NodeOptions, cores_per_rank: int | None) -> TrialNodes:
    """Return the nodes that the options or the allocation determine, as for ``paceline run``.

    Raises:
        ValueError: Same as for ``find_target``; or the cores of a node are not known.
    """
    target = _find_target(options)
    if target.tool is not None and not target.tool.accepts_host_names:
        raise ValueError(
            f"{target.tool.name} uses all nodes of its allocation for one job, so trials can't run "
            "side by side. HINT: --launcher ssh or srun"
        )
    found = []
    for host in target.hosts:
        cores = host.slots if target.explicit else host.cpus or host.slots
        if cores is None:
            raise ValueError(
                f"the number of cores of {host.name} is not known ({target.why}). HINT: -H "
                f"{host.name}:N"
            )
        found.append(Node(host.name, cores, host.devices or 0))
    launcher = None if target.tool is None else options.launcher or target.tool.name
    return TrialNodes(found, launcher, target.why, cores_per_rank)
