"""Artificial hosts: the files in /sys that describe the hardware, below any root folder.

As a program, write one of them: python fake_sysfs.py ROOT ac922.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from paceline.plurals import format_ranges

NVIDIA, MELLANOX, INTEL = 0x10DE, 0x15B3, 0x8086
GPU, INFINIBAND, ETHERNET, DISPLAY = 0x030200, 0x020700, 0x020000, 0x030000


@dataclass
class Device:
    """A PCI device: its bus ID, and the bridges between it and the root of its bus."""

    bus: str
    node: int
    bridges: tuple[str, ...] = ()
    kind: int = GPU
    vendor: int = NVIDIA
    name: str = ""  # of a network card


@dataclass
class Host:
    """The cores, as lists of hardware threads by (socket, NUMA node), and the devices."""

    cores: dict[tuple[int, int], list[list[int]]]
    memory_only: list[int] = field(default_factory=list)
    efficient: list[int] = field(default_factory=list)  # hardware threads of efficiency cores
    devices: list[Device] = field(default_factory=list)


def ac922() -> Host:
    """IBM POWER9: 2 sockets of 22 cores, each with 4 adjacent hardware threads.

    The memory of the 6 GPUs appears as NUMA nodes, 3 per socket. Each socket has a network card
    with two ports.
    """
    devices = [Device(f"0004:0{i}:00.0", 0, ("0004:00:00.0",)) for i in (4, 5, 6)]
    devices += [Device(f"0035:0{i}:00.0", 8, ("0035:00:00.0",)) for i in (3, 4, 5)]
    for i, (domain, node) in enumerate([("0003", 0), ("0003", 0), ("0033", 8), ("0033", 8)]):
        bus = f"{domain}:01:00.{i % 2}"
        devices.append(Device(bus, node, (), INFINIBAND, MELLANOX, f"mlx5_{i}"))
    cores = [[4 * c + t for t in range(4)] for c in range(44)]
    return Host({(0, 0): cores[:22], (8, 8): cores[22:]}, [252, 253, 254, 255], [], devices)


def dgx() -> Host:
    """NVIDIA DGX: 2 sockets of 64 cores with 2 hardware threads, 4 NUMA nodes per socket.

    Each of the 4 PCI switches has two GPUs and two network cards and is near every other NUMA node.
    """
    cores = {
        (node // 4, node): [[c, c + 128] for c in range(16 * node, 16 * node + 16)]
        for node in range(8)
    }
    devices = []
    for i, (node, root, gpus, nics) in enumerate(
        [
            (3, "00", ("07", "0f"), ("0c", "12")),
            (1, "40", ("47", "4e"), ("4b", "54")),
            (7, "80", ("87", "90"), ("8d", "94")),
            (5, "b0", ("b7", "bd"), ("ba", "cc")),
        ]
    ):
        above = (f"0000:{root}:01.1", f"0000:{root[0]}1:00.0")
        devices += [Device(f"0000:{bus}:00.0", node, above) for bus in gpus]
        for k, bus in enumerate(nics):
            name = f"mlx5_{2 * i + k}"
            devices.append(Device(f"0000:{bus}:00.0", node, above, INFINIBAND, MELLANOX, name))
    devices.append(Device("0000:e1:00.0", 4, (), ETHERNET, INTEL, "enp225s0"))
    return Host(cores, devices=devices)


def small() -> Host:
    """Return a host with 2 sockets of 4 cores with 2 hardware threads."""
    return Host(
        {(n, n): [[c, c + 8] for c in range(4 * n, 4 * n + 4)] for n in (0, 1)},
        devices=[Device("0000:19:00.0", 0, (), ETHERNET, INTEL, "eth0")],
    )


def workstation() -> Host:
    """Return a host with 8 performance cores, 8 efficiency cores and two display adapters.

    The performance cores have 2 hardware threads. The adapters are integrated graphics and a GPU
    with screens.
    """
    cores = [[c, c + 1] for c in range(0, 16, 2)] + [[c] for c in range(16, 24)]
    devices = [
        Device("0000:00:02.0", -1, (), DISPLAY, INTEL),
        Device("0000:01:00.0", -1, ("0000:00:01.0",), DISPLAY),
        Device("0000:04:00.0", -1, ("0000:00:1c.0",), ETHERNET, INTEL, "enp4s0"),
    ]
    return Host({(0, 0): cores}, [], list(range(16, 24)), devices)


HOSTS = {"ac922": ac922, "dgx": dgx, "small": small, "workstation": workstation}


def write(root: Path, host: Host) -> None:
    """Write the files of a host below the root."""
    every = sorted(cpu for cores in host.cores.values() for core in cores for cpu in core)
    _cpus(root / "sys/devices/system/cpu", host, every)
    _nodes(root / "sys/devices/system/node", host, every)
    if host.efficient:
        strong = [cpu for cpu in every if cpu not in host.efficient]
        _put(root / "sys/devices/cpu_core/cpus", format_ranges(strong))
        _put(root / "sys/devices/cpu_atom/cpus", format_ranges(host.efficient))
    for device in host.devices:
        _device(root / "sys", device, _of_node(host, device.node) or every)


def _cpus(folder: Path, host: Host, every: list[int]) -> None:
    for name in ("online", "possible", "present"):
        _put(folder / name, format_ranges(every))
    _put(folder / "offline", "")
    _put(folder / "kernel_max", 2047)
    for (package, node), cores in host.cores.items():
        socket = [
            cpu
            for (other, _), its in host.cores.items()
            for core in its
            for cpu in core
            if other == package
        ]
        for core in cores:
            for cpu in core:
                own = folder / f"cpu{cpu}"
                if cpu:  # the first one cannot be switched off
                    _put(own / "online", 1)
                (own / f"node{node}").mkdir(parents=True, exist_ok=True)
                _put(own / "topology/physical_package_id", package)
                _put(own / "topology/core_id", core[0])
                for old, new, cpus in (
                    ("thread_siblings", "core_cpus", core),
                    ("core_siblings", "package_cpus", socket),
                ):
                    for name in (old, new):
                        _put(own / "topology" / f"{name}_list", format_ranges(cpus))
                        _put(own / "topology" / name, _mask(cpus, len(every)))


def _nodes(folder: Path, host: Host, every: list[int]) -> None:
    package = {node: package for package, node in host.cores}
    numbers = sorted([*package, *host.memory_only])
    for number in numbers:
        own = folder / f"node{number}"
        _put(own / "cpulist", format_ranges(_of_node(host, number)))
        _put(own / "cpumap", _mask(_of_node(host, number), every[-1] + 1))
        far = [_distance(number, other, package) for other in numbers]
        _put(own / "distance", " ".join(map(str, far)))
        size = (16 if number in host.memory_only else 256) << 20
        _put(own / "meminfo", f"Node {number} MemTotal:  {size} kB\nNode {number} MemFree:  0 kB")
    for name in ("online", "possible", "has_memory"):
        _put(folder / name, format_ranges(numbers))
    _put(folder / "has_cpu", format_ranges(sorted(package)))


def _distance(one: int, other: int, package: dict[int, int]) -> int:
    if one == other:
        return 10
    if one not in package or other not in package:
        return 80  # a NUMA node without cores
    return 12 if package[one] == package[other] else 40


def _device(sys_: Path, device: Device, near: list[int]) -> None:
    first = device.bridges[0] if device.bridges else device.bus
    own = sys_.joinpath("devices", f"pci{first[:7]}", *device.bridges, device.bus)
    _put(own / "class", f"{device.kind:#08x}")
    _put(own / "vendor", f"{device.vendor:#06x}")
    _put(own / "numa_node", device.node)
    _put(own / "local_cpulist", format_ranges(near))
    _link(sys_ / "bus/pci/devices" / device.bus, own)
    if device.kind == INFINIBAND:
        entry = own / "infiniband" / device.name
        _put(entry / "ports/1/state", "4: ACTIVE")
        _link(sys_ / "class/infiniband" / device.name, entry)
        _link(entry / "device", own)
    elif device.kind == ETHERNET:
        entry = own / "net" / device.name
        _put(entry / "operstate", "up")
        _link(sys_ / "class/net" / device.name, entry)
        _link(entry / "device", own)


def _mask(cpus: list[int], width: int) -> str:
    """Format a CPU mask as the kernel does: groups of 32 bits."""
    digits = f"{sum(1 << cpu for cpu in cpus):0{(width + 31) // 32 * 8}x}"
    return ",".join(digits[i : i + 8] for i in range(0, len(digits), 8))


def _of_node(host: Host, number: int) -> list[int]:
    return sorted(
        cpu
        for (_, node), cores in host.cores.items()
        for core in cores
        for cpu in core
        if node == number
    )


def _put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def _link(path: Path, to: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(to, path.parent))  # relative, so that the tree can be moved


if __name__ == "__main__":
    write(Path(sys.argv[1]), HOSTS[sys.argv[2]]())
