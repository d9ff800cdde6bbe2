"""Read a host's sockets, NUMA nodes, cores and hardware threads from sysfs.

Where sysfs is missing or incomplete, the rest is assumed, and ``Topology.guessed`` describes how.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .local_resources import spans, unspanned

# A core with less than this part of the strongest one's capacity is an efficiency core: strong
# cores of one kind differ by some percent, for the clock rates that they reach.
CLEARLY_LOWER = 0.7


@dataclass(frozen=True)
class Cpu:
    """One hardware thread, as the kernel numbers them."""

    number: int
    core: int  # the lowest number among the threads of its core: unique on the host
    package: int  # socket
    node: int | None = None  # NUMA node
    efficient: bool = False  # whether it is one of a hybrid processor's efficiency cores


@dataclass(frozen=True)
class Node:
    """One NUMA node. One without cpus is memory only (a GPU's on POWER9): no home for a rank."""

    number: int
    cpus: tuple[int, ...] = ()
    bytes: int = 0  # of memory; 0: none, or nobody said
    distances: dict[int, int] = field(default_factory=dict, hash=False)  # by node; 10: itself


@dataclass(frozen=True)
class Topology:
    """A host's hardware threads and NUMA nodes, in the order of their numbers."""

    cpus: tuple[Cpu, ...]
    nodes: tuple[Node, ...]
    guessed: str = ""  # what is not from sysfs, and why; empty: nothing

    def at(self, numbers: Iterable[int]) -> list[Cpu]:
        """Those hardware threads; what this host has not is left out."""
        wanted = set(numbers)
        return [cpu for cpu in self.cpus if cpu.number in wanted]

    def cores(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """The cores that those hardware threads belong to."""
        return tuple(sorted({cpu.core for cpu in self.at(numbers)}))

    def packages(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """The sockets that those hardware threads are on."""
        return tuple(sorted({cpu.package for cpu in self.at(numbers)}))

    def numa_nodes(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """The NUMA nodes that those hardware threads are on."""
        return tuple(sorted({cpu.node for cpu in self.at(numbers) if cpu.node is not None}))


def topology(root: Path = Path("/")) -> Topology:
    """Return the topology of this host, or of the files below another root."""
    system = root / "sys/devices/system"
    online = _online(system / "cpu")
    if not online:
        return _nothing_known(system / "cpu")
    nodes = _nodes(system / "node", set(online))
    node_of = {cpu: node.number for node in reversed(nodes) for cpu in node.cpus}
    efficient = _efficient(root, online)
    cpus, silent = [], []
    for number in online:
        folder = system / f"cpu/cpu{number}/topology"
        core = _core(folder, number, set(online))
        if core is None:
            silent.append(number)
        package = whole(folder / "physical_package_id")
        cpus.append(
            Cpu(
                number,
                number if core is None else core,
                package if package is not None and package >= 0 else 0,
                node_of.get(number),
                number in efficient,
            )
        )
    guessed = ""
    if silent:
        guessed = (
            f"{system / 'cpu'} does not say which cores the hardware threads {spans(silent)} are: "
            "each is taken for a core of its own"
        )
    return Topology(tuple(cpus), tuple(nodes), guessed)


def _nothing_known(folder: Path) -> Topology:
    mine = tuple(sorted(os.sched_getaffinity(0)))
    why = "can't be read" if folder.exists() else "is not there"
    return Topology(
        tuple(Cpu(number, number, 0, 0) for number in mine),
        (Node(0, mine, 0, {0: 10}),),
        f"{folder} {why}, as in some containers: the hardware threads {spans(list(mine))}, which "
        "this process may use, are taken for cores of one socket and one NUMA node",
    )


def _online(folder: Path) -> list[int]:
    """Hardware threads that work. The list in the file `online` alone would mislead: some
    containers make it up, and leave the folders as they are."""
    listed = _list(folder / "online")
    found = []
    for cpu in _numbered(folder, "cpu"):
        own = folder / f"cpu{cpu}"
        there = listed is None or cpu in listed or (own / "topology").is_dir()
        if there and whole(own / "online") != 0:
            found.append(cpu)
    return found


def _core(folder: Path, number: int, online: set[int]) -> int | None:
    """The lowest number among the threads of this one's core; None: nothing is said."""
    for name in ("core_cpus_list", "thread_siblings_list"):
        siblings = _list(folder / name)
        if siblings is not None and number in siblings:
            return min(siblings & online)
    return None


def _nodes(folder: Path, online: set[int]) -> list[Node]:
    numbers = _numbered(folder, "node")
    found = []
    for number in numbers:
        own = folder / f"node{number}"
        cpus = (_list(own / "cpulist") or set()) & online
        memory = 0
        for line in text(own / "meminfo").splitlines():
            words = line.split()
            if len(words) > 3 and words[2] == "MemTotal:" and words[3].isdigit():
                memory = int(words[3]) * 1024
        far = text(own / "distance").split()
        complete = len(far) == len(numbers) and all(word.isdigit() for word in far)
        distances = dict(zip(numbers, map(int, far), strict=True)) if complete else {}
        found.append(Node(number, tuple(sorted(cpus)), memory, distances))
    return found


def _efficient(root: Path, online: list[int]) -> set[int]:
    """Efficiency cores of a hybrid processor: Intel's kernel driver names them, elsewhere their
    capacity is clearly lower. None, where all are of one kind."""
    devices = root / "sys/devices"
    strong = (_list(devices / "cpu_core/cpus") or set()) & set(online)
    if strong:
        kinds = ("cpu_atom", "cpu_lowpower")
        return set().union(*(_list(devices / f"{kind}/cpus") or set() for kind in kinds)) - strong
    capacities = {cpu: whole(devices / f"system/cpu/cpu{cpu}/cpu_capacity") for cpu in online}
    known = {cpu: capacity for cpu, capacity in capacities.items() if capacity is not None}
    most = max(known.values(), default=0)
    return {cpu for cpu, capacity in known.items() if capacity < CLEARLY_LOWER * most}


def _numbered(folder: Path, name: str) -> list[int]:
    """Numbers of the folders cpu0, cpu1, ..."""
    try:
        found = [path.name.removeprefix(name) for path in folder.iterdir()]
    except OSError:
        return []
    return sorted(int(rest) for rest in found if rest.isascii() and rest.isdigit())


def text(path: Path) -> str:
    """Return the content of a sysfs file; empty where it can't be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def whole(path: Path) -> int | None:
    """Return the integer in a sysfs file, or None where there is none."""
    try:
        return int(text(path))
    except ValueError:
        return None


def _list(path: Path) -> set[int] | None:
    """The numbers in a file such as "0-3,8"; None where it can't be read."""
    try:
        return set(unspanned(path.read_text().strip()))
    except (OSError, ValueError):
        return None
