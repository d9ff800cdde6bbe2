"""Where the sizes of a scaling study run: this machine, named hosts, or an allocation.

Every size fills as few hosts as possible, in their order, so that all sizes share the first ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...analyze.scaling.study_model import Setup
from ...cluster.topology.local_resources import allowed_threads
from ...cluster.topology.topology import topology
from ...launch.options import NodeOptions
from ...launch.target import find_target
from ...plurals import counted


@dataclass(frozen=True)
class Place:
    """Hosts for all sizes.

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
        """Return the number of hosts that so many ranks use."""
        if not self.names:  # ``paceline run`` distributes the ranks over all hosts
            return min(ranks, len(self.slots))
        for hosts in range(1, len(self.slots)):
            first = self.slots[:hosts]
            if None not in first and sum(one or 0 for one in first) >= ranks:
                return hosts
        return len(self.slots)

    def where(self, ranks: int, first_host: int = 0) -> list[str]:
        """Return the options of ``paceline run`` that select the hosts of so many ranks."""
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


def side_by_side(setups: Sequence[Setup], place: Place) -> list[list[Setup]]:
    """Return groups of setups that can run at the same time, each on hosts of its own."""
    groups: list[list[Setup]] = []
    for setup in setups:
        taken = (
            sum(place.hosts_of(other.ranks) for other in groups[-1]) if groups else len(place.slots)
        )
        if place.names and taken + place.hosts_of(setup.ranks) <= len(place.slots):
            groups[-1].append(setup)
        else:
            groups.append([setup])
    return groups


def place_of(where: Sequence[str]) -> Place:
    """Return the place that stored options or the allocation determine, as for ``paceline run``.

    Raises:
        ValueError: Same as for ``find_target``.
    """
    stored = dict(zip(where[::2], where[1::2], strict=True))
    hostfile = stored.get("--hostfile")
    hosts, launcher = stored.get("-H"), stored.get("--launcher")
    target = find_target(NodeOptions(hosts, Path(hostfile) if hostfile else None, launcher))
    given = ("--launcher", launcher) if launcher else ()
    if target.tool is None:
        (here,) = target.hosts
        cores = len(topology().cores(set(allowed_threads())))
        return Place(target.why, (here.devices or cores,), (), given, cores)
    names, by_daemon = tuple(host.name for host in target.hosts), target.tool.by_daemon
    slots: tuple[int | None, ...] = tuple(host.slots for host in target.hosts)
    if target.explicit:
        if None in slots:
            typed = ("-H", hosts) if hosts else ("--hostfile", str(hostfile))
            return Place(target.why, slots, (), (*typed, *given), by_daemon=by_daemon)
        return Place(target.why, slots, names, given, by_daemon=by_daemon)
    slots = tuple(host.devices or host.cpus or host.slots for host in target.hosts)
    cpus = [host.cpus for host in target.hosts if host.cpus is not None]
    each = min(cpus) if len(cpus) == len(slots) else None
    if not target.tool.accepts_host_names or None in slots:
        return Place(target.why, slots, (), given, each, by_daemon)
    named = ("--launcher", launcher or target.tool.name)
    return Place(target.why, slots, names, named, each, by_daemon)


def check_side_by_side(place: Place) -> None:
    """Raise ValueError if sizes can't run at the same time, each on hosts of its own."""
    if len(place.names) < 2:
        one = f"the sizes would share one node ({place.why}), and disturb each other"
        several = f"the nodes of a size can't be chosen ({place.why})"
        raise ValueError(
            f"--side-by-side: {one if len(place.slots) < 2 else several}. HINT: leave it out, or "
            "name hosts with the ranks of each: -H host1:4,host2:4"
        )


def check_sizes(sizes: Sequence[int], place: Place) -> None:
    """Raise ValueError for sizes that the place has no cores or GPUs for."""
    capacity = place.capacity
    beyond = [size for size in sizes if capacity is not None and size > capacity]
    if not beyond:
        return
    fitting = [size for size in sizes if size not in beyond]
    hint = f"-n {','.join(map(str, fitting))}, " if fitting else ""
    raise ValueError(
        f"-n {','.join(map(str, beyond))}: there is room for {counted(capacity or 0, 'rank')} "
        f"({place.why}), one for each core or GPU. HINT: {hint}--submit for jobs of a scheduler, "
        "or --oversubscribe to share cores, which measures something else"
    )
