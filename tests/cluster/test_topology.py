"""Hardware topology and cards of a host, from artificial hosts and from the current one."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from fake_sysfs import HOSTS, Device, Host, small, write

from paceline.cluster.topology.pci_devices import Card, nearest_cards, pci_cards
from paceline.cluster.topology.topology import Cpu, Node, topology
from paceline.plurals import format_ranges

CPUS = "sys/devices/system/cpu"
NODES = "sys/devices/system/node"


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """Write the files of a host once, for tests that do not change them."""
    root = tmp_path_factory.mktemp("hosts")

    def make(name):
        if not (root / name).exists():
            write(root / name, HOSTS[name]())
        return root / name

    return make


@pytest.fixture
def own(tmp_path):
    def make(name):
        write(tmp_path, HOSTS[name]())
        return tmp_path

    return make


def by_kind(found, kind):
    return [card for card in found if card.kind == kind]


def test_topology_of_ac922(host):
    found = topology(host("ac922"))
    assert found.guessed == ""
    assert len(found.cpus) == 176
    assert found.cpus[89] == Cpu(89, core=88, package=8, node=8)
    assert found.cores(range(176)) == tuple(range(0, 176, 4))
    assert found.packages([3, 88]) == (0, 8)


def test_gpu_memory_is_numa_node_without_cores(host):
    found = topology(host("ac922"))
    assert [node.number for node in found.nodes] == [0, 8, 252, 253, 254, 255]
    assert [node.number for node in found.nodes if node.cpus] == [0, 8]
    assert found.nodes[0].bytes == 256 << 30
    assert found.nodes[0].distances == {0: 10, 8: 40, 252: 80, 253: 80, 254: 80, 255: 80}


def test_topology_of_dgx(host):
    found = topology(host("dgx"))
    assert found.cpus[200] == Cpu(200, core=72, package=1, node=4)
    assert found.nodes[3].cpus == (*range(48, 64), *range(176, 192))
    assert found.numa_nodes([0, 255]) == (0, 7)


def test_efficiency_cores_from_intel_pmu(host):
    found = topology(host("workstation"))
    assert [cpu.number for cpu in found.cpus if cpu.efficient] == list(range(16, 24))
    assert found.cores(range(24)) == (*range(0, 16, 2), *range(16, 24))


def test_efficiency_cores_from_cpu_capacity(own):
    root = own("small")
    for cpu in range(16):
        capacity = 446 if cpu < 4 else 1024 - cpu  # performance cores differ slightly
        (root / CPUS / f"cpu{cpu}/cpu_capacity").write_text(f"{capacity}\n")
    assert [cpu.number for cpu in topology(root).cpus if cpu.efficient] == [0, 1, 2, 3]


def test_no_efficiency_cores_if_all_cores_are_small(own):
    root = own("small")
    (root / "sys/devices/cpu_atom").mkdir()
    (root / "sys/devices/cpu_atom/cpus").write_text("0-15\n")
    assert not any(cpu.efficient for cpu in topology(root).cpus)


def test_offline_hardware_threads_are_ignored(own):
    root = own("small")
    for cpu in (2, 8, 9):
        (root / CPUS / f"cpu{cpu}/online").write_text("0\n")
    shutil.rmtree(root / CPUS / "cpu8/topology")
    (root / CPUS / "online").write_text("0-1,3-7,10-15\n")
    found = topology(root)
    assert [cpu.number for cpu in found.cpus] == [0, 1, *range(3, 8), *range(10, 16)]
    assert found.at([10])[0].core == 10  # hardware thread 2, of the same core, is offline
    assert found.nodes[0].cpus == (0, 1, 3, 10, 11)


def test_cores_missing_from_online_list_in_container_are_found(own):
    root = own("small")
    (root / CPUS / "online").write_text("0-3\n")  # the four cores that the container was given
    assert len(topology(root).cpus) == 16


def test_topology_without_sysfs_uses_process_affinity(tmp_path):
    found = topology(tmp_path)
    mine = sorted(os.sched_getaffinity(0))
    assert found.cpus == tuple(Cpu(number, number, 0, 0) for number in mine)
    assert found.nodes == (Node(0, tuple(mine), 0, {0: 10}),)
    assert f"{CPUS} does not exist" in found.guessed
    assert format_ranges(mine) in found.guessed
    assert pci_cards(tmp_path) == []


def test_topology_is_guessed_if_sysfs_is_incomplete(tmp_path):
    for cpu in range(4):
        (tmp_path / CPUS / f"cpu{cpu}").mkdir(parents=True)
    (tmp_path / CPUS / "online").write_text("0-3\n")
    found = topology(tmp_path)
    assert [cpu.core for cpu in found.cpus] == [0, 1, 2, 3]
    assert "does not report the cores of the hardware threads 0-3" in found.guessed
    assert found.nodes == ()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (f"{CPUS}/online", "0-\n"),
        (f"{CPUS}/cpu3/topology/core_cpus_list", "nonsense\n"),
        (f"{CPUS}/cpu3/topology/core_cpus_list", "4,12\n"),  # the list lacks the thread itself
        (f"{CPUS}/cpu3/topology/physical_package_id", "-1\n"),
        (f"{NODES}/node0/cpulist", "0-999\n"),  # includes another node's and absent threads
        (f"{NODES}/node0/cpulist", "?\n"),
        (f"{NODES}/node0/distance", "10\n"),
        (f"{NODES}/node0/meminfo", "Node 0 MemTotal: much kB\n"),
    ],
)
def test_inconsistent_sysfs_files_are_tolerated(own, path, text):
    root = own("small")
    (root / path).write_text(text)
    found = topology(root)
    assert [cpu.number for cpu in found.cpus] == list(range(16))
    assert found.at([3])[0].package == 0


def test_undecodable_sysfs_file_is_ignored(own):
    root = own("small")
    (root / CPUS / "cpu3/topology/core_cpus_list").write_bytes(b"\xff\xfe\n")
    assert topology(root).at([3])[0].core == 3  # from the other file


def test_gpus_are_sorted_by_pci_bus_id(host):
    gpus = by_kind(pci_cards(host("ac922")), "gpu")
    assert [gpu.name for gpu in gpus] == [
        *("0004:04:00.0", "0004:05:00.0", "0004:06:00.0"),
        *("0035:03:00.0", "0035:04:00.0", "0035:05:00.0"),
    ]
    assert [gpu.node for gpu in gpus] == [0, 0, 0, 8, 8, 8]
    assert gpus[3].cpus == tuple(range(88, 176))
    assert gpus[3].path == ("pci0035:00", "0035:00:00.0", "0035:03:00.0")


def test_network_cards_are_sorted_by_name(host):
    found = pci_cards(host("dgx"))
    assert [card.name for card in by_kind(found, "ib")] == [f"mlx5_{i}" for i in range(8)]
    assert [card.name for card in by_kind(found, "net")] == ["enp225s0"]


def test_integrated_gpu_is_ignored(host):
    found = pci_cards(host("workstation"))
    assert [card.name for card in by_kind(found, "gpu")] == ["0000:01:00.0"]
    assert found[0].node is None


def test_inactive_and_virtual_network_cards_are_ignored(own):
    root = own("dgx")
    (root / "sys/class/infiniband/mlx5_3/ports/1/state").write_text("1: DOWN\n")
    (root / "sys/class/net/enp225s0/operstate").write_text("down\n")
    (root / "sys/devices/virtual/net/lo").mkdir(parents=True)
    (root / "sys/class/net/lo").symlink_to("../../devices/virtual/net/lo")
    (root / "sys/class/net/circle").symlink_to("circle")
    found = [card.name for card in pci_cards(root) if card.kind != "gpu"]
    assert found == [f"mlx5_{i}" for i in (0, 1, 2, 4, 5, 6, 7)]


def dgx_with_a_driver(own):
    """Return a DGX where the driver tells the numbers of three GPUs; no device files exist yet."""
    root = own("dgx")
    for minor, bus in enumerate(("0000:07:00.0", "0000:0f:00.0", "0000:47:00.0")):
        folder = root / f"proc/driver/nvidia/gpus/{bus}"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t H100\nDevice Minor: \t {minor}\n")
    (root / "dev").mkdir()
    return root


def test_container_has_only_gpus_with_device_files(own):
    root = dgx_with_a_driver(own)
    for minor in (1, 2):
        (root / f"dev/nvidia{minor}").touch()
    gpus = by_kind(pci_cards(root), "gpu")
    assert [gpu.name for gpu in gpus] == ["0000:0f:00.0", "0000:47:00.0"]


DEVICES = Path("/sys/fs/cgroup/devices")


@pytest.mark.skipif(
    os.geteuid() != 0 or not (DEVICES / "devices.list").exists(),
    reason="needs root and the devices' cgroup",
)
def test_gpus_denied_by_device_cgroup_are_ignored(own):
    root = dgx_with_a_driver(own)
    for minor in range(3):
        os.mknod(root / f"dev/nvidia{minor}", stat.S_IFCHR | 0o666, os.makedev(195, minor))
    group = DEVICES / f"paceline-{os.getpid()}"
    group.mkdir()
    try:
        (group / "devices.deny").write_text("c 195:0 rwm")
        code = f"""
import os
open("{group}/cgroup.procs", "w").write(str(os.getpid()))
from pathlib import Path
from paceline.cluster.topology.pci_devices import pci_cards
print(*(card.name for card in pci_cards(Path("{root}")) if card.kind == "gpu"))
"""
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (said.stdout, said.stderr) == ("0000:0f:00.0 0000:47:00.0\n", "")
    finally:
        group.rmdir()


def test_amd_display_gpus_only_without_accelerators(tmp_path):
    host = small()
    host.devices = [
        Device("0000:05:00.0", 0, (), 0x030000, 0x1002),
        Device("0000:2a:00.0", 1, (), 0x120000, 0x1002),
        Device("0000:1a:00.0", 0, (), 0x038000, 0x1002),
    ]
    write(tmp_path / "server", host)
    names = [card.name for card in pci_cards(tmp_path / "server")]
    assert names == ["0000:1a:00.0", "0000:2a:00.0"]
    host.devices = host.devices[:1]
    write(tmp_path / "desktop", host)
    assert [card.name for card in pci_cards(tmp_path / "desktop")] == ["0000:05:00.0"]


def test_nearest_nic_is_behind_same_pci_switch(host):
    root = host("dgx")
    found = pci_cards(root)
    gpus, nics = by_kind(found, "gpu"), by_kind(found, "ib")
    near = [[nic.name for nic in nearest_cards(gpu, nics)] for gpu in gpus]
    assert near == [
        *(["mlx5_0", "mlx5_1"], ["mlx5_0", "mlx5_1"], ["mlx5_2", "mlx5_3"], ["mlx5_2", "mlx5_3"]),
        *(["mlx5_4", "mlx5_5"], ["mlx5_4", "mlx5_5"], ["mlx5_6", "mlx5_7"], ["mlx5_6", "mlx5_7"]),
    ]


def test_nearest_nic_is_on_same_numa_node_or_socket(own):
    root = own("ac922")
    found = pci_cards(root)
    gpus, nics = by_kind(found, "gpu"), by_kind(found, "ib")
    assert [nic.name for nic in nearest_cards(gpus[4], nics)] == ["mlx5_2", "mlx5_3"]
    two = Host({(n // 2, n): [[n]] for n in range(4)})
    two.devices = [Device("0000:01:00.0", 3), Device("0001:01:00.0", 2, (), 0x020700, 0, "mlx5_1")]
    two.devices.append(Device("0002:01:00.0", 0, (), 0x020700, 0, "mlx5_0"))
    write(root / "two", two)
    gpu, *nics = pci_cards(root / "two")
    assert [nic.name for nic in nearest_cards(gpu, nics, topology(root / "two"))] == ["mlx5_1"]
    assert [nic.name for nic in nearest_cards(gpu, nics)] == [
        "mlx5_0",
        "mlx5_1",
    ]  # without a topology


def test_nearest_without_location_returns_all_nics():
    nics = [Card("ib", "mlx5_0"), Card("ib", "mlx5_1")]
    assert nearest_cards(Card("gpu", "0000:01:00.0"), nics) == nics
    assert nearest_cards(Card("gpu", "0000:01:00.0"), []) == []


def test_topology_matches_lscpu():
    found = topology()
    assert set(os.sched_getaffinity(0)) <= {cpu.number for cpu in found.cpus}
    if not Path("/sys/devices/system/cpu/cpu0/topology").is_dir() or not shutil.which("lscpu"):
        pytest.skip("no lscpu, or no /sys that it could read")
    command = ["lscpu", "-p=cpu,core,socket,node"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split(",") for line in said.splitlines() if not line.startswith("#")]
    assert [cpu.number for cpu in found.cpus] == [int(row[0]) for row in rows]
    assert len({cpu.core for cpu in found.cpus}) == len({row[1] for row in rows})
    assert len({cpu.package for cpu in found.cpus}) == len({row[2] for row in rows})
    if all(row[3] for row in rows):
        assert [cpu.node for cpu in found.cpus] == [int(row[3]) for row in rows]
