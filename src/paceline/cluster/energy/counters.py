"""Energy counters in sysfs: RAPL of Intel and AMD processors, and those of HPE Cray nodes.

RAPL (``/sys/class/powercap``, documented in the kernel's ``power/powercap``) counts the energy of
each processor package and of its memory, in microjoules, and starts again at 0 after
``max_energy_range_uj``. ``/sys/cray/pm_counters`` counts joules of the whole node, its processors,
its memory and its accelerators.

A package or a node is charged by the share of its hardware threads that the job holds, memory by
the share of the node's memory. Such a figure is an estimate, because nobody measures which core
used how much; the energy of idle cores is not charged to the job.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from ..topology.local_resources import allowed_threads, memory_limits, parse_ranges
from ..topology.topology import read_sysfs_int

POWERCAP = "sys/class/powercap"
CRAY = "sys/cray/pm_counters"
_ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")  # intel-rapl-mmio counts the same packages again
_CRAY_VALUE = re.compile(r"(\d{1,18}) J\b")
_ACCELERATOR = re.compile(r"accel\d+_energy")
MAX_TEXT = 4096
READ_ALL = "all of it is charged"
HINT_UNREADABLE = (
    "HINT: only root reads it by default; ask the administrators to let users read it (chmod 444)"
)


@dataclass(frozen=True)
class Counter:
    """A counter of consumed energy.

    Attributes:
        source: "package 0", "memory 0", "node", "processors", "memory", "accelerator 0", "GPU 0".
        read_j: Return the counter's value in J. Raises OSError or ValueError.
        wrap_j: Value after which it starts again at 0; None if it does not.
        share: Part of it that is charged to the job.
        how: How it is read and charged, in words.
        within: Source of a counter that contains this one; "" if there is none.
    """

    source: str
    read_j: Callable[[], float]
    wrap_j: float | None
    share: float
    how: str
    within: str = ""

    @property
    def is_estimate(self) -> bool:
        """Whether only a part of the counter is charged."""
        return self.share < 1


@dataclass(frozen=True)
class Held:
    """What the job holds of a node.

    Attributes:
        threads: Numbers of its hardware threads.
        packages: For each package, its hardware threads.
        memory_share: Of the node's memory; None if the job has no limit of its own.
    """

    threads: frozenset[int]
    packages: dict[int, frozenset[int]]
    memory_share: float | None

    def share_of(self, package: int | None = None) -> float:
        """Return the held share of a package's hardware threads, or of the node's."""
        every = frozenset[int]().union(*self.packages.values())
        whole = every if package is None else self.packages.get(package, frozenset())
        return len(self.threads & whole) / len(whole) if whole else 1.0


def find_held(threads: Collection[int] | None = None, root: Path = Path("/")) -> Held:
    """Return what the job holds.

    threads: Its hardware threads; None: those that this process may use.
    """
    cpus = root / "sys/devices/system/cpu"
    packages: dict[int, set[int]] = {}
    for cpu in _online(cpus):
        package = read_sysfs_int(cpus / f"cpu{cpu}/topology/physical_package_id")
        packages.setdefault(package if package is not None and package >= 0 else 0, set()).add(cpu)
    held = frozenset(allowed_threads() if threads is None else threads)
    return Held(held, {at: frozenset(one) for at, one in packages.items()}, _memory_share(root))


def _online(cpus: Path) -> list[int]:
    try:
        return parse_ranges((cpus / "online").read_text()[:MAX_TEXT].strip())
    except (OSError, ValueError):
        return []


def _memory_share(root: Path) -> float | None:
    """Return the share of the node's memory that the job's control groups allow."""
    allowed = min((allowed for allowed, _ in memory_limits()), default=None)
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        whole = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    return None if allowed is None else min(allowed / whole, 1.0)


def sysfs_counters(held: Held, root: Path = Path("/")) -> tuple[list[Counter], list[str]]:
    """Return the counters of this node that can be read, and what cannot be read, with the reason.

    RAPL is not used where the node has Cray's counters, which contain the same energy.
    """
    found, notes = _cray(held, root)
    if found:
        return found, notes
    rapl, missing = _rapl(held, root)
    if not rapl and not missing and not notes:
        missing = [f"this machine has no energy counters of its processors (/{POWERCAP}, /{CRAY})"]
    return rapl, notes + missing


def _cray(held: Held, root: Path) -> tuple[list[Counter], list[str]]:
    folder = root / CRAY
    cores = held.share_of()
    memory = cores if held.memory_share is None else held.memory_share
    found, notes = list[Counter](), list[str]()
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError:
        return [], []
    for name in names:
        if name == "energy":
            source, share, within = "node", cores, ""
        elif name == "cpu_energy":
            source, share, within = "processors", cores, "node"
        elif name == "memory_energy":
            source, share, within = "memory", memory, "node"
        elif _ACCELERATOR.fullmatch(name):
            number = name.removeprefix("accel").removesuffix("_energy")
            source, share, within = f"accelerator {number}", 1.0, "node"
        else:
            continue
        how = f"/{CRAY}/{name}, {_charged(share, source)}"
        counter = Counter(source, _reader(folder / name, _parse_cray), None, share, how, within)
        _add_readable(counter, f"/{CRAY}/{name}", found, notes)
    if not any(one.source == "node" for one in found):
        found = [replace(one, within="") for one in found]
    return found, notes


def _rapl(held: Held, root: Path) -> tuple[list[Counter], list[str]]:
    """Return packages and their memory; cores and graphics are parts of their package."""
    found, notes = list[Counter](), list[str]()
    try:
        zones = sorted(one for one in (root / POWERCAP).iterdir() if _ZONE.fullmatch(one.name))
    except OSError:
        return [], []
    package_of: dict[str, int] = {}
    for zone in zones:
        name = _text(zone / "name")
        if (match := re.match(r"package-(\d{1,4})", name)) is not None:
            package_of[zone.name] = int(match[1])
    for zone in zones:
        name = _text(zone / "name")
        number = package_of.get(zone.name.rpartition(":")[0] if name == "dram" else zone.name)
        if number is None:
            continue
        share = held.share_of(number)
        source = f"package {number}"
        if name == "dram":
            source = f"memory {number}"
            share = share if held.memory_share is None else held.memory_share
        if not share:
            continue  # none of its cores are the job's
        wrap = read_sysfs_int(zone / "max_energy_range_uj")
        read = _reader(zone / "energy_uj", lambda text: int(text) / 1e6)
        how = f"/{POWERCAP}/{zone.name} ({name}), {_charged(share, source)}"
        counter = Counter(source, read, wrap / 1e6 if wrap else None, share, how)
        _add_readable(counter, f"/{POWERCAP}/{zone.name}/energy_uj", found, notes)
    return found, notes


def _charged(share: float, source: str) -> str:
    if share >= 1:
        return READ_ALL
    what = "memory" if source.startswith("memory") else "cores"
    return f"{100 * share:.3g} % of it are charged, the job's share of the {what}"


def _add_readable(counter: Counter, name: str, found: list[Counter], notes: list[str]) -> None:
    try:
        counter.read_j()
    except PermissionError:
        notes.append(f"{name} is not readable. {HINT_UNREADABLE}")
    except (OSError, ValueError):
        notes.append(f"{name} has no value that can be read")
    else:
        found.append(counter)


def _reader(path: Path, parse: Callable[[str], float]) -> Callable[[], float]:
    def read() -> float:
        with path.open() as file:
            return parse(file.read(MAX_TEXT).strip())

    return read


def _parse_cray(text: str) -> float:
    match = _CRAY_VALUE.match(text)
    if match is None:
        raise ValueError("not a number of joules")
    return float(match[1])


def _text(path: Path) -> str:
    try:
        return path.read_text()[:MAX_TEXT].strip()
    except (OSError, ValueError):
        return ""
