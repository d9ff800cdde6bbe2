"""Facts of a host that need no measurement: versions, CPU, affinity, memory, limits, devices."""

import os
import platform
import re
import resource
import socket
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from ....cluster.topology.local_resources import free_memory
from ....cluster.topology.pci_devices import Card, pci_cards
from ....cluster.topology.racks import rack_or_unknown
from ....cluster.topology.topology import read_sysfs, topology
from ....cost.machine.machine_file import UNLIMITED, Gpu, HostFacts, Limits, Network
from ....plurals import format_ranges
from ....record.ring.memory_sampler import memory_limits
from ....version import __version__
from .torch_build import library_versions, torch_build

SHM = Path("/dev/shm")
TEMPORARY = Path("/tmp")


def host_facts(name: str, ranks: int, cpus: Iterable[int], folder: Path | None) -> HostFacts:
    """Return the facts of this host.

    Args:
        name: The host's name in the job.
        ranks: Number of ranks on this host.
        cpus: Hardware threads that these ranks may run on together.
        folder: Folder whose free disk space is reported; None means /tmp.
    """
    known = topology()
    mask = sorted(cpus)
    missing = {"cores": known.guessed} if known.guessed else {}
    processor = _processor()
    if not processor:
        missing["processor"] = "/proc/cpuinfo does not name it"
    gpus = _gpus()
    networks = [_network(card) for card in pci_cards() if card.kind != "gpu"]
    return HostFacts(
        name=name,
        processor=processor,
        sockets=len({cpu.package for cpu in known.cpus}),
        cores=len({cpu.core for cpu in known.cpus}),
        threads=len(known.cpus),
        numa_nodes=max(1, len(known.nodes)),
        ranks=ranks,
        mask=format_ranges(mask),
        memory_bytes=_total_memory(),
        free_memory_bytes=free_memory(),
        free_disk_bytes=free_space(folder or TEMPORARY),
        versions=_versions(),
        torch_build=torch_build(),
        limits=_limits(),
        missing=missing,
        gpus=tuple(gpus),
        networks=tuple(networks),
    )


def extra_facts(folder: Path | None) -> dict[str, Any]:
    """Return facts that the machine file format has no field for; only the table shows them."""
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    return {
        "hostname": socket.gethostname(),
        "boot_id": boot_id(),
        "leaf_switch": rack_or_unknown(os.environ.get("SLURMD_NODENAME") or socket.gethostname()),
        "nproc_limit": None if processes == resource.RLIM_INFINITY else processes,
        "free_tmp_bytes": free_space(TEMPORARY),
        "free_folder_bytes": None if folder is None else free_space(folder),
    }


def boot_id() -> str:
    """Return the kernel's boot ID, or the host name where it is not available.

    The boot ID is the same in all containers and namespaces of one running kernel.
    """
    return read_sysfs(Path("/proc/sys/kernel/random/boot_id")) or socket.gethostname()


def free_space(folder: Path) -> int | None:
    """Return the bytes that this user may still write to a folder; None if unknown."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "paceline": __version__}
    for package in ("torch", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    driver = re.search(r"Module +([\d.]+)", read_sysfs(Path("/proc/driver/nvidia/version")))
    if driver:
        found["driver"] = driver[1]
    return {**found, **library_versions(), "kernel": platform.release()}


def _processor() -> str:
    """Return the CPU's name from /proc/cpuinfo (x86, then POWER), else the board's name (Arm)."""
    text = read_sysfs(Path("/proc/cpuinfo"))
    for key in ("model name", "cpu"):
        found = re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE)
        if found:
            return found[1].strip()
    return read_sysfs(Path("/proc/device-tree/model")).rstrip("\0")


def _total_memory() -> int | None:
    found = re.search(r"^MemTotal:\s*(\d+) kB", read_sysfs(Path("/proc/meminfo")), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _limits() -> Limits:
    def soft(kind: int) -> int:
        value, _ = resource.getrlimit(kind)
        return UNLIMITED if value == resource.RLIM_INFINITY else value

    try:
        shm = os.statvfs(SHM)
        size: int | None = shm.f_blocks * shm.f_frsize
    except OSError:
        size = None
    groups = [limit for limit, _ in memory_limits()]
    return Limits(
        nofile=soft(resource.RLIMIT_NOFILE),
        memlock_bytes=soft(resource.RLIMIT_MEMLOCK),
        stack_bytes=soft(resource.RLIMIT_STACK),
        shm_bytes=size,
        shm_free_bytes=free_space(SHM),
        cgroup_memory_bytes=min(groups, default=UNLIMITED),
    )


def _gpus() -> list[Gpu]:
    """Return the GPUs that torch sees, else those on the PCI bus with their driver's name."""
    import torch

    if torch.cuda.is_available():
        found = []
        for number in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(number)
            found.append(Gpu(torch.cuda.get_device_name(number), total, free))
        return found
    return [Gpu(_model(card)) for card in pci_cards() if card.kind == "gpu"]


def _model(card: Card) -> str:
    text = read_sysfs(Path("/proc/driver/nvidia/gpus") / card.name / "information")
    found = re.search(r"^Model:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else f"GPU {card.name}"


def _network(card: Card) -> Network:
    if card.kind == "ib":
        port = next(iter(sorted(Path(f"/sys/class/infiniband/{card.name}/ports").glob("*"))), None)
        if port is None:
            return Network(card.name)
        return Network(card.name, read_sysfs(port / "link_layer"), read_sysfs(port / "rate"))
    speed = read_sysfs(Path(f"/sys/class/net/{card.name}/speed"))
    known = speed.isdigit() and int(speed) > 0  # virtual interfaces report -1
    return Network(card.name, "Ethernet", f"{int(speed) / 1000:g} Gb/s" if known else "")
