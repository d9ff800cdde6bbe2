"""The GPUs and network cards of a host, and their distances on its PCI buses."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from ...plurals import parse_ranges
from .topology import Topology, read_sysfs, read_sysfs_int

NVIDIA, AMD, INTEL = 0x10DE, 0x1002, 0x8086
# PCI device classes of each vendor's GPUs. Intel's displays (0x0300) are integrated into the
# processor. AMD's displays may be, and are used only if there are no other AMD GPUs.
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
    """A GPU or network card.

    Attributes:
        kind: "gpu", "ib" (InfiniBand or RoCE card) or "net" (another network card).
        name: Bus id of a GPU, such as "0000:3b:00.0"; name of a network card, such as "mlx5_0".
        node: NUMA node, if the host reports it.
        cpus: Hardware threads near the card.
        path: PCI path: the root of its bus, the bridges, and the card itself.
    """

    kind: str
    name: str
    node: int | None = None
    cpus: tuple[int, ...] = ()
    path: tuple[str, ...] = ()


def pci_cards(root: Path = Path("/")) -> list[Card]:
    """Return the cards of this host, or of the files below another root.

    GPUs come first, by bus id: this is CUDA's order with CUDA_DEVICE_ORDER=PCI_BUS_ID. Network
    cards follow, by name. Only GPUs of one vendor are returned, as a program uses one vendor's
    GPUs. Network cards are returned if they are PCI devices and not unplugged.
    """
    found = _gpus(root)
    for folder, kind in (("infiniband", "ib"), ("net", "net")):
        for entry in sorted(_entries(root / "sys/class" / folder), key=_by_number):
            if not _unplugged(entry, kind):
                found += _card(entry, kind, entry.name)
    return found


def nearest_cards(gpu: Card, nics: Sequence[Card], topology: Topology | None = None) -> list[Card]:
    """Return the network cards that are nearest to a GPU.

    These are the ones that share most components of its PCI path; if none shares any, those on
    its NUMA node, then those on its socket. If none is nearer than another, all are returned.
    """
    sockets = topology.packages(gpu.cpus) if topology is not None else ()

    def nearness(nic: Card) -> tuple[int, bool, bool]:
        same_node = gpu.node is not None and nic.node == gpu.node
        same_socket = topology is not None and topology.packages(nic.cpus) == sockets != ()
        return _shared(gpu, nic), same_node, same_socket

    nearest = max((nearness(nic) for nic in nics), default=None)
    return [nic for nic in nics if nearness(nic) == nearest]


def _shared(a: Card, b: Card) -> int:
    """Return the number of leading components that two PCI paths share."""
    pairs = zip(a.path, b.path, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _gpus(root: Path) -> list[Card]:
    devices: dict[int, dict[int, list[Path]]] = {}
    for entry in _entries(root / "sys/bus/pci/devices"):
        vendor, kind = _hexadecimal(entry / "vendor"), _hexadecimal(entry / "class") >> 8
        if kind in GPUS.get(vendor, ()) and (vendor != NVIDIA or is_reachable(root, entry.name)):
            devices.setdefault(vendor, {}).setdefault(kind, []).append(entry)
    for vendor in GPUS:
        kinds = devices.get(vendor, {})
        if vendor == AMD and len(kinds) > 1:
            kinds.pop(DISPLAY, None)
        if kinds:
            entries = sorted((entry for some in kinds.values() for entry in some), key=_by_bus)
            return [card for entry in entries for card in _card(entry, "gpu", entry.name)]
    return []


def is_reachable(root: Path, bus: str) -> bool:
    """Return whether this process may use an NVIDIA GPU; True if there is no driver to tell.

    sysfs shows all GPUs of the host, also in a container and under Slurm's ConstrainDevices.
    ``os.access`` also checks the devices control group, and does not wake up the GPU.
    """
    driver = root / "proc/driver/nvidia/gpus"
    if not _entries(driver):
        return True
    text = read_sysfs(driver / bus / "information")
    minor = re.search(r"^Device Minor:\s*(\d+)", text, re.MULTILINE)
    return minor is not None and os.access(root / f"dev/nvidia{minor[1]}", os.R_OK | os.W_OK)


def _card(entry: Path, kind: str, name: str) -> list[Card]:
    """Return the card of one sysfs entry in a list; an empty list if it is not a PCI device."""
    try:
        path = (entry / "device" if (entry / "device").is_dir() else entry).resolve()
    except (OSError, RuntimeError):  # circular symbolic links
        return []
    roots = [i for i, part in enumerate(path.parts) if ROOT.fullmatch(part)]
    addresses = [i for i, part in enumerate(path.parts) if ADDRESS.fullmatch(part)]
    if not addresses:
        return []
    folder = Path(*path.parts[: addresses[-1] + 1])
    start = roots[-1] if roots and roots[-1] < addresses[-1] else addresses[0]
    node = read_sysfs_int(folder / "numa_node")
    try:
        cpus = tuple(parse_ranges(read_sysfs(folder / "local_cpulist")))
    except ValueError:
        cpus = ()
    parts = path.parts[start : addresses[-1] + 1]
    return [Card(kind, name, None if node == -1 else node, cpus, parts)]


def _unplugged(entry: Path, kind: str) -> bool:
    """Return whether the kernel reports that the network card has no link."""
    if kind == "net":
        return read_sysfs(entry / "operstate") in ("down", "lowerlayerdown", "notpresent")
    states = [read_sysfs(port / "state") for port in _entries(entry / "ports")]
    return bool(states) and not any("ACTIVE" in state or not state for state in states)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _by_bus(entry: Path) -> tuple[int, ...]:
    return tuple(int(part, 16) for part in re.findall(r"[0-9a-f]+", entry.name))


def _by_number(entry: Path) -> tuple[str, int, str]:
    """Return a sort key that orders mlx5_2 before mlx5_10."""
    stem = entry.name.rstrip("0123456789")
    return stem, int("0" + entry.name[len(stem) :]), entry.name


def _hexadecimal(path: Path) -> int:
    try:
        return int(read_sysfs(path), 16)
    except ValueError:
        return 0
