"""Measure the energy of a run on this node."""

import importlib
import os
import re
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from ..record.ring.memory_sampler import memory_limits
from .topology.local_resources import allowed_threads
from .topology.topology import read_sysfs, read_sysfs_int, topology
from .topology.visible_gpus import UNKNOWN, visible_devices

INTERVAL_S = 1.0  # between two readings; RAPL starts again after some minutes at the earliest


# Energy counters in sysfs: RAPL of Intel and AMD processors, and those of HPE Cray nodes.
#
# RAPL (``/sys/class/powercap``, documented in the kernel's ``power/powercap``) counts the energy
# of each processor package and of its memory, in microjoules, and starts again at 0 after
# ``max_energy_range_uj``. ``/sys/cray/pm_counters`` counts joules of the whole node, its
# processors, its memory and its accelerators.
#
# A package or a node is charged by the share of its hardware threads that the job holds, memory
# by the share of the node's memory. Such a figure is an estimate, because nobody measures which
# core used how much; the energy of idle cores is not charged to the job.

POWERCAP = "sys/class/powercap"
CRAY = "sys/cray/pm_counters"
_ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")  # intel-rapl-mmio counts the same packages again
_CRAY_VALUE = re.compile(r"(\d{1,18}) J\b")
_ACCELERATOR = re.compile(r"accel(\d+)_energy")
MAX_TEXT = 4096
CORES, MEMORY, ALL = "cores", "memory", "device"  # what the charged share is a share of
# Files of Cray's counters that are no accelerators: source, and by what it is charged.
CRAY_COUNTERS = {
    "energy": ("node", CORES),
    "cpu_energy": ("processors", CORES),
    "memory_energy": ("memory", MEMORY),
}
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
        name: Where it is read.
        package: Package whose cores or memory it counts; None: the node.
        by: Share by which it is charged: CORES, MEMORY or ALL.
        within: Source of a counter that contains this one; "" if there is none.
        share: Part of it that is charged to the job.
    """

    source: str
    read_j: Callable[[], float]
    wrap_j: float | None
    name: str
    by: str
    package: int | None = None
    within: str = ""
    share: float = 1.0

    @property
    def how(self) -> str:
        """How it is read and charged, in words."""
        if self.share >= 1:
            return f"{self.name}, all of it is charged"
        part = f"{100 * self.share:.3g} % of it are charged"
        return f"{self.name}, {part}, the job's share of the {self.by}"

    @property
    def is_estimate(self) -> bool:
        """Whether only a part of the counter is charged."""
        return self.share < 1


@dataclass(frozen=True)
class NodeShare:
    """The hardware threads and the memory of a node that the job may use.

    Attributes:
        threads: Numbers of its hardware threads.
        packages: Hardware threads of each package.
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


def find_node_share(threads: Collection[int] | None = None, root: Path = Path("/")) -> NodeShare:
    """Return the hardware threads and the memory that the job may use.

    threads: Its hardware threads; None: those that this process may use.
    """
    packages: dict[int, frozenset[int]] = {}
    for cpu in topology(root).cpus:
        packages[cpu.package] = packages.get(cpu.package, frozenset()) | {cpu.number}
    of_job = frozenset(allowed_threads() if threads is None else threads)
    return NodeShare(of_job, packages, _memory_share(root))


def _memory_share(root: Path) -> float | None:
    """Return the share of the node's memory that the job's control groups allow."""
    allowed = min((allowed for allowed, _ in memory_limits()), default=None)
    total = re.search(r"^MemTotal:\s*(\d+) kB", read_sysfs(root / "proc/meminfo"), re.MULTILINE)
    if allowed is None or total is None:
        return None
    return min(allowed / (int(total[1]) << 10), 1.0)


def charged_counters(
    counters: Collection[Counter], threads: Collection[int] | None = None, root: Path = Path("/")
) -> list[Counter]:
    """Return the counters with the shares of a job; those that count nothing of it are left out.

    threads: Its hardware threads; None: those that this process may use.
    """
    node_share = find_node_share(threads, root)
    charged = [replace(counter, share=_share(counter, node_share)) for counter in counters]
    return [counter for counter in charged if counter.share > 0]


def _share(counter: Counter, node_share: NodeShare) -> float:
    if counter.by == ALL:
        return 1.0
    cores = node_share.share_of(counter.package)
    if counter.by == CORES or node_share.memory_share is None or not cores:
        return cores
    return node_share.memory_share


def sysfs_counters(root: Path = Path("/")) -> tuple[list[Counter], list[str]]:
    """Return the counters of this node that can be read, and what cannot be read, with the reason.

    RAPL is not used where the node has Cray's counters, which contain the same energy.
    """
    found, notes = _cray(root)
    if found:
        return found, notes
    rapl, missing = _rapl(root)
    if not rapl and not missing and not notes:
        missing = [f"there are no energy counters of the processors (/{POWERCAP}, /{CRAY})"]
    return rapl, notes + missing


def _cray(root: Path) -> tuple[list[Counter], list[str]]:
    folder = root / CRAY
    found, notes = list[Counter](), list[str]()
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError:
        return [], []
    for name in names:
        accelerator = _ACCELERATOR.fullmatch(name)
        if accelerator is None and name not in CRAY_COUNTERS:
            continue
        source, by = CRAY_COUNTERS.get(name, ("", ALL))
        if accelerator is not None:
            source = f"accelerator {accelerator[1]}"
        read = _counter_reader(folder / name, _parse_cray)
        within = "" if source == "node" else "node"
        counter = Counter(source, read, None, f"/{CRAY}/{name}", by, within=within)
        _add_readable(counter, f"/{CRAY}/{name}", found, notes)
    if not any(counter.source == "node" for counter in found):
        found = [replace(counter, within="") for counter in found]
    return found, notes


def _rapl(root: Path) -> tuple[list[Counter], list[str]]:
    """Return packages and their memory; cores and graphics are parts of their package."""
    found, notes = list[Counter](), list[str]()
    try:
        zones = sorted(zone for zone in (root / POWERCAP).iterdir() if _ZONE.fullmatch(zone.name))
    except OSError:
        return [], []
    packages: dict[str, int] = {}
    for zone in zones:
        if (match := re.match(r"package-(\d{1,4})", read_sysfs(zone / "name"))) is not None:
            packages[zone.name] = int(match[1])
    for zone in zones:
        name = read_sysfs(zone / "name")
        is_memory = name == "dram"
        number = packages.get(zone.name.rpartition(":")[0] if is_memory else zone.name)
        if number is None:
            continue
        wrap = read_sysfs_int(zone / "max_energy_range_uj")
        counter = Counter(
            f"{'memory' if is_memory else 'package'} {number}",
            _counter_reader(zone / "energy_uj", lambda text: int(text) / 1e6),
            wrap / 1e6 if wrap else None,
            f"/{POWERCAP}/{zone.name} ({name})",
            MEMORY if is_memory else CORES,
            number,
        )
        _add_readable(counter, f"/{POWERCAP}/{zone.name}/energy_uj", found, notes)
    return found, notes


def _add_readable(counter: Counter, name: str, found: list[Counter], notes: list[str]) -> None:
    try:
        counter.read_j()
    except PermissionError:
        notes.append(f"{name} is not readable. {HINT_UNREADABLE}")
    except (OSError, ValueError):
        notes.append(f"{name} has no value that can be read")
    else:
        found.append(counter)


def _counter_reader(path: Path, parse: Callable[[str], float]) -> Callable[[], float]:
    def read() -> float:
        with path.open() as file:
            return parse(file.read(MAX_TEXT).strip())

    return read


def _parse_cray(text: str) -> float:
    match = _CRAY_VALUE.match(text)
    if match is None:
        raise ValueError("not a number of joules")
    return float(match[1])


# Energy counters of NVIDIA GPUs, by the package nvidia-ml-py.

HINT = "HINT: pip install nvidia-ml-py"


def gpu_counters(root: Path = Path("/"), nvml: Any = None) -> tuple[list[Counter], list[str]]:
    """Return a counter for each visible GPU, and why there is none.

    nvml: The module pynvml; None imports it.
    """
    visible = visible_devices(os.environ, root)
    if not visible:
        return [], []
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return [], [f"the energy of GPUs is unknown without NVML. {HINT}"]
    found, notes = [], list[str]()
    try:
        nvml.nvmlInit()
        for index in visible:
            if index == UNKNOWN:
                notes.append("the energy of a GPU is unknown: its index is not known")
                continue
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            counter = Counter(f"GPU {index}", _reader(nvml, handle), None, "NVML", ALL)
            counter.read_j()
            found.append(counter)
    except nvml.NVMLError as error:  # GPUs before Volta have no counter
        notes.append(f"the energy of GPUs cannot be read: {error}")
    return found, notes


def _reader(nvml: Any, handle: Any) -> Callable[[], float]:
    def read() -> float:
        try:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
        except nvml.NVMLError as error:
            raise OSError(str(error)) from error

    return read


@dataclass(frozen=True)
class EnergyUse:
    """Energy from one counter that is charged to the job.

    Attributes:
        source: As in Counter.
        joules: From start to stop.
        is_estimate: Whether it is a share of a counter that covers more than the job.
        how: How it was read and charged.
        within: Source of a counter that contains this one; "" if there is none.
        times: When it was read (s, ``time.monotonic()``).
        charged: Joules charged until then.
    """

    source: str
    joules: float
    is_estimate: bool
    how: str
    within: str = ""
    times: list[float] = field(default_factory=list)
    charged: list[float] = field(default_factory=list)

    def between(self, start: float, end: float) -> float:
        """Return the joules between two times (s, ``time.monotonic()``), interpolated."""
        return max(self._until(end) - self._until(start), 0.0)

    def _until(self, at: float) -> float:
        i = bisect_left(self.times, at)
        if i == 0:
            return 0.0
        if i == len(self.times):
            return self.charged[-1]
        begin, end = self.times[i - 1], self.times[i]
        part = (at - begin) / (end - begin)
        return self.charged[i - 1] + part * (self.charged[i] - self.charged[i - 1])


class EnergyMeter:
    """Reads the counters of this node until it is stopped.

    Args:
        root: Root of /sys and /proc.
        nvml: The module pynvml; None imports it if there is a GPU.

    Attributes:
        notes: What cannot be read, and why.
    """

    def __init__(self, root: Path = Path("/"), nvml: Any = None) -> None:
        self._root = root
        self._counters, notes = sysfs_counters(root)
        counters_of_gpus, gpu_notes = gpu_counters(root, nvml)
        self._counters += counters_of_gpus
        self.notes = notes + gpu_notes
        self._last = [0.0] * len(self._counters)
        self._times: list[float] = []
        self._used: list[list[float]] = [[] for _ in self._counters]
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._read_regularly, daemon=True)

    def start(self) -> Self:
        """Begin to measure."""
        self.sample()
        if self._counters:
            self._thread.start()
        return self

    def stop(self) -> None:
        """End the measurement."""
        if self._thread.is_alive():
            self._ends.set()
            self._thread.join()
        self.sample()

    def charged(self, threads: Collection[int] | None = None) -> list[EnergyUse]:
        """Return what is charged to the job, until the last reading.

        threads: Hardware threads that the job holds; None: those that this process may use.
        """
        sources = [counter.source for counter in self._counters]
        readings = dict(zip(sources, self._used, strict=True))
        uses = []
        for counter in charged_counters(self._counters, threads, self._root):
            used = [counter.share * joules for joules in readings[counter.source]]
            origin = counter.is_estimate, counter.how, counter.within
            uses.append(EnergyUse(counter.source, used[-1], *origin, list(self._times), used))
        return uses

    def sample(self) -> None:
        """Read all counters once.

        A counter that cannot be read any more stays where it was, and ``notes`` says so.
        """
        self._times.append(time.monotonic())
        for i, counter in enumerate(self._counters):
            before, used = self._last[i], self._used[i]
            try:
                now = counter.read_j()
            except (OSError, ValueError):
                note = f"{counter.source}: the counter could not be read all the time"
                if note not in self.notes:
                    self.notes.append(note)
                now = before
            used.append(used[-1] + _difference(before, now, counter) if used else 0.0)
            self._last[i] = now

    def _read_regularly(self) -> None:
        while not self._ends.wait(INTERVAL_S):
            self.sample()


def _difference(before: float, now: float, counter: Counter) -> float:
    """Return the energy between two readings, in which the counter may have started again."""
    if now >= before:
        return now - before
    return now - before + counter.wrap_j if counter.wrap_j is not None else now
