"""A host's sockets, NUMA nodes, cores and hardware threads, read from sysfs.

If sysfs is missing or incomplete, the rest is assumed, and ``Topology.guessed`` describes how.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ...plurals import format_ranges, parse_ranges

# A core with less than this share of the largest core's capacity is an efficiency core.
# Performance cores of one kind differ by some percent, because they reach different clock rates.
CLEARLY_LOWER = 0.7


@dataclass(frozen=True)
class Cpu:
    """One hardware thread.

    Attributes:
        number: The kernel's number of the hardware thread.
        core: Lowest number among the hardware threads of its core; unique on the host.
        package: Socket.
        node: NUMA node.
        efficient: Whether its core is an efficiency core of a hybrid processor.
    """

    number: int
    core: int
    package: int
    node: int | None = None
    efficient: bool = False


@dataclass(frozen=True)
class Node:
    """One NUMA node.

    A node without cpus has only memory (such as a GPU's on POWER9), and no rank can run on it.

    Attributes:
        bytes: Size of its memory; 0 if it has none or the size is unknown.
        distances: Distance to each node, by number; 10 for itself.
    """

    number: int
    cpus: tuple[int, ...] = ()
    bytes: int = 0
    distances: dict[int, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Topology:
    """A host's hardware threads and NUMA nodes, in the order of their numbers.

    Attributes:
        guessed: What was assumed rather than read from sysfs, and why; empty if nothing.
    """

    cpus: tuple[Cpu, ...]
    nodes: tuple[Node, ...]
    guessed: str = ""

    def at(self, numbers: Iterable[int]) -> list[Cpu]:
        """Return these hardware threads, without those that this host does not have."""
        wanted = set(numbers)
        return [cpu for cpu in self.cpus if cpu.number in wanted]

    def cores(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Return the cores of these hardware threads."""
        return tuple(sorted({cpu.core for cpu in self.at(numbers)}))

    def cores_of_cpus(self, cpus: int) -> int:
        """Return the number of cores that a scheduler's number of CPUs stands for.

        A number above the number of cores counts hardware threads. A lower one is taken for cores.
        """
        threads = len(self.cpus)
        cores = len(self.cores(cpu.number for cpu in self.cpus))
        return cpus if cpus <= cores else max(1, cpus * cores // threads)

    def packages(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Return the sockets of these hardware threads."""
        return tuple(sorted({cpu.package for cpu in self.at(numbers)}))

    def numa_nodes(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Return the NUMA nodes of these hardware threads."""
        return tuple(sorted({cpu.node for cpu in self.at(numbers) if cpu.node is not None}))


def topology(root: Path = Path("/")) -> Topology:
    """Return the topology of this host, or of the files below another root."""
    system = root / "sys/devices/system"
    online = _online(system / "cpu")
    if not online:
        return _guess_topology(system / "cpu")
    nodes = _nodes(system / "node", set(online))
    node_of = {cpu: node.number for node in reversed(nodes) for cpu in node.cpus}
    efficient = _efficient(root, online)
    cpus, without_core = [], []
    for number in online:
        folder = system / f"cpu/cpu{number}/topology"
        core = _core(folder, number, set(online))
        if core is None:
            without_core.append(number)
        package = read_sysfs_int(folder / "physical_package_id")
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
    if without_core:
        guessed = (
            f"{system / 'cpu'} does not report the cores of the hardware threads "
            f"{format_ranges(without_core)}: Paceline treats each as one core"
        )
    return Topology(tuple(cpus), tuple(nodes), guessed)


def _guess_topology(folder: Path) -> Topology:
    threads = tuple(sorted(os.sched_getaffinity(0)))
    reason = "can't be read" if folder.exists() else "does not exist"
    return Topology(
        tuple(Cpu(number, number, 0, 0) for number in threads),
        (Node(0, threads, 0, {0: 10}),),
        f"{folder} {reason}, as in some containers: Paceline treats the hardware threads "
        f"{format_ranges(list(threads))}, which this process may use, as cores of one socket and "
        "one NUMA node",
    )


def _online(folder: Path) -> list[int]:
    """Return the hardware threads that are online.

    The file `online` alone is not reliable: some containers invent its content and leave the
    folders unchanged.
    """
    listed = _list(folder / "online")
    found = []
    for cpu in _numbered(folder, "cpu"):
        cpu_folder = folder / f"cpu{cpu}"
        is_listed = listed is None or cpu in listed or (cpu_folder / "topology").is_dir()
        if is_listed and read_sysfs_int(cpu_folder / "online") != 0:
            found.append(cpu)
    return found


def _core(folder: Path, number: int, online: set[int]) -> int | None:
    """Return the lowest number among the hardware threads of this one's core; None if unknown."""
    for name in ("core_cpus_list", "thread_siblings_list"):
        siblings = _list(folder / name)
        if siblings is not None and number in siblings:
            return min(siblings & online)
    return None


def _nodes(folder: Path, online: set[int]) -> list[Node]:
    numbers = _numbered(folder, "node")
    nodes = []
    for number in numbers:
        node_folder = folder / f"node{number}"
        cpus = (_list(node_folder / "cpulist") or set()) & online
        memory = 0
        for line in read_sysfs(node_folder / "meminfo").splitlines():
            words = line.split()
            if len(words) > 3 and words[2] == "MemTotal:" and words[3].isdigit():
                memory = int(words[3]) * 1024
        row = read_sysfs(node_folder / "distance").split()
        complete = len(row) == len(numbers) and all(word.isdigit() for word in row)
        distances = dict(zip(numbers, map(int, row), strict=True)) if complete else {}
        nodes.append(Node(number, tuple(sorted(cpus)), memory, distances))
    return nodes


def _efficient(root: Path, online: list[int]) -> set[int]:
    """Return the hardware threads of efficiency cores; empty if all cores are of one kind.

    Intel's kernel driver names the efficiency cores. On other hosts, their capacity is clearly
    lower.
    """
    devices = root / "sys/devices"
    performance = (_list(devices / "cpu_core/cpus") or set()) & set(online)
    if performance:
        kinds = ("cpu_atom", "cpu_lowpower")
        others = set[int]().union(*(_list(devices / f"{kind}/cpus") or set() for kind in kinds))
        return others - performance
    capacities = {
        cpu: read_sysfs_int(devices / f"system/cpu/cpu{cpu}/cpu_capacity") for cpu in online
    }
    known = {cpu: capacity for cpu, capacity in capacities.items() if capacity is not None}
    largest = max(known.values(), default=0)
    return {cpu for cpu, capacity in known.items() if capacity < CLEARLY_LOWER * largest}


def _numbered(folder: Path, name: str) -> list[int]:
    """Return the numbers of the folders cpu0, cpu1, ..., sorted."""
    try:
        found = [path.name.removeprefix(name) for path in folder.iterdir()]
    except OSError:
        return []
    return sorted(int(rest) for rest in found if rest.isascii() and rest.isdigit())


def read_sysfs(path: Path) -> str:
    """Return the content of a sysfs file; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def cpu_flags(root: Path = Path("/")) -> set[str]:
    """Return the features of the processor in /proc/cpuinfo, such as "avx2"; empty if unknown."""
    text = read_sysfs(root / "proc/cpuinfo")
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


def read_sysfs_int(path: Path) -> int | None:
    """Return the integer in a sysfs file, or None if there is none."""
    try:
        return int(read_sysfs(path))
    except ValueError:
        return None


def _list(path: Path) -> set[int] | None:
    """Return the numbers in a file with content such as "0-3,8"; None if it cannot be read."""
    try:
        return set(parse_ranges(path.read_text().strip()))
    except (OSError, ValueError):
        return None
