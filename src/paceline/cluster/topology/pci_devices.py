"""The GPUs and network cards of a host, and which are near each other on its PCI buses."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .local_resources import unspanned
from .topology import Topology, text, whole

NVIDIA, AMD, INTEL = 0x10DE, 0x1002, 0x8086
# The kinds of PCI device that a vendor's GPUs call themselves. Intel's displays (0x0300) are the
# processor's own; AMD's may be, and count where there are no others.
DISPLAY, COMPUTE, OTHER_DISPLAY, ACCELERATOR = 0x0300, 0x0302, 0x0380, 0x1200
GPUS = {
    NVIDIA: (DISPLAY, COMPUTE, OTHER_DISPLAY),
    AMD: (COMPUTE, OTHER_DISPLAY, ACCELERATOR, DISPLAY),
    INTEL: (COMPUTE, OTHER_DISPLAY),
}
ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True)
class Card:
    """A GPU ("gpu"), an InfiniBand or RoCE card ("ib") or another network card ("net")."""

    kind: str
    name: str  # a GPU's bus id as "0000:3b:00.0", else as "mlx5_0" or "eth0"
    node: int | None = None  # NUMA node, where the host says it
    cpus: tuple[int, ...] = ()  # the hardware threads near it
    path: tuple[str, ...] = ()  # from the root of its PCI bus through the bridges to itself


def cards(root: Path = Path("/")) -> list[Card]:
    """This host's, or those of the tree of files below another root: GPUs by bus id, which is
    the order of CUDA's numbers with CUDA_DEVICE_ORDER=PCI_BUS_ID, then network cards by name.

    GPUs of one vendor only, as one program uses them; network cards only where they are PCI
    devices and not unplugged."""
    found = _gpus(root)
    for folder, kind in (("infiniband", "ib"), ("net", "net")):
        for entry in sorted(_entries(root / "sys/class" / folder), key=_by_number):
            if not _unplugged(entry, kind):
                found += _card(entry, kind, entry.name)
    return found


def distance(a: Card, b: Card) -> int:
    """Steps on the PCI buses from one to the other: parts of their paths that they don't share."""
    return len(a.path) + len(b.path) - 2 * _shared(a, b)


def nearest(gpu: Card, nics: Sequence[Card], topology: Topology | None = None) -> list[Card]:
    """The network cards that share the most of the PCI path with a GPU; of those that share
    none, the ones on its NUMA node, then on its socket. All, where none is nearer than another."""
    sockets = topology.packages(gpu.cpus) if topology is not None else ()

    def nearness(nic: Card) -> tuple[int, bool, bool]:
        same_node = gpu.node is not None and nic.node == gpu.node
        same_socket = topology is not None and topology.packages(nic.cpus) == sockets != ()
        return _shared(gpu, nic), same_node, same_socket

    most = max((nearness(nic) for nic in nics), default=None)
    return [nic for nic in nics if nearness(nic) == most]


def _shared(a: Card, b: Card) -> int:
    """Parts at the start that two paths have in common."""
    count = 0
    for one, other in zip(a.path, b.path, strict=False):
        if one != other:
            break
        count += 1
    return count


def _gpus(root: Path) -> list[Card]:
    devices: dict[int, dict[int, list[Path]]] = {}
    for entry in _entries(root / "sys/bus/pci/devices"):
        vendor, kind = _hexadecimal(entry / "vendor"), _hexadecimal(entry / "class") >> 8
        if kind in GPUS.get(vendor, ()) and (vendor != NVIDIA or _reachable(root, entry.name)):
            devices.setdefault(vendor, {}).setdefault(kind, []).append(entry)
    for vendor in GPUS:
        kinds = devices.get(vendor, {})
        if vendor == AMD and len(kinds) > 1:
            kinds.pop(DISPLAY, None)
        if kinds:
            entries = sorted((entry for some in kinds.values() for entry in some), key=_by_bus)
            return [card for entry in entries for card in _card(entry, "gpu", entry.name)]
    return []


def _reachable(root: Path, bus: str) -> bool:
    """Whether this process was given an NVIDIA GPU: sysfs shows all of the host's, also in a
    container and under Slurm's ConstrainDevices (access asks the devices' cgroup as well, and
    wakes no GPU up). Where there is no driver, nobody knows."""
    driver = root / "proc/driver/nvidia/gpus"
    if not _entries(driver):
        return True
    said = text(driver / bus / "information")
    minor = re.search(r"^Device Minor:\s*(\d+)", said, re.MULTILINE)
    return minor is not None and os.access(root / f"dev/nvidia{minor[1]}", os.R_OK | os.W_OK)


def _card(entry: Path, kind: str, name: str) -> list[Card]:
    """The card of one entry in sysfs; none, if it is no PCI device."""
    try:
        real = (entry / "device" if (entry / "device").is_dir() else entry).resolve()
    except (OSError, RuntimeError):  # links in a circle
        return []
    roots = [i for i, part in enumerate(real.parts) if ROOT.fullmatch(part)]
    own = [i for i, part in enumerate(real.parts) if ADDRESS.fullmatch(part)]
    if not own:
        return []
    folder = Path(*real.parts[: own[-1] + 1])
    start = roots[-1] if roots and roots[-1] < own[-1] else own[0]
    node = whole(folder / "numa_node")
    try:
        cpus = tuple(unspanned(text(folder / "local_cpulist")))
    except ValueError:
        cpus = ()
    return [Card(kind, name, None if node == -1 else node, cpus, real.parts[start : own[-1] + 1])]


def _unplugged(entry: Path, kind: str) -> bool:
    """Whether the kernel says that nothing is at the other end of its cable."""
    if kind == "net":
        return text(entry / "operstate") in ("down", "lowerlayerdown", "notpresent")
    states = [text(port / "state") for port in _entries(entry / "ports")]
    return bool(states) and not any("ACTIVE" in state or not state for state in states)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _by_bus(entry: Path) -> tuple[int, ...]:
    return tuple(int(part, 16) for part in re.findall(r"[0-9a-f]+", entry.name))


def _by_number(entry: Path) -> tuple[str, int, str]:
    """mlx5_2 before mlx5_10."""
    stem = entry.name.rstrip("0123456789")
    return stem, int("0" + entry.name[len(stem) :]), entry.name


def _hexadecimal(path: Path) -> int:
    try:
        return int(text(path), 16)
    except ValueError:
        return 0
