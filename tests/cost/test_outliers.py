"""Outliers on artificial machines: faults are reported, noise is not."""

import re
import time
from dataclasses import replace

import pytest
from machines import GPU, Maker, with_host, with_links

from paceline.cost.machine.machine_file import UNLIMITED, Figure, Gpu, Limits, Network
from paceline.cost.outliers import find_outliers


def kinds(machine):
    return [(one.kind, one.hosts) for one in find_outliers(machine)]


def sentences(machine):
    return " | ".join(one.sentence for one in find_outliers(machine))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 16])
def test_noise_is_not_an_outlier(count):
    for seed in range(20):
        for noise in (0.002, 0.01, 0.05):
            machine = Maker(seed, noise).machine(count, gpus=count % 5)
            assert sentences(machine) == "", (seed, noise)


def test_noise_of_128_hosts_is_not_an_outlier():
    machine = Maker(1).machine(128, gpus=2)
    start = time.perf_counter()
    assert sentences(machine) == ""
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize(("count", "gpus"), [(3, 0), (4, 2), (16, 0), (128, 1)])
def test_slow_host_is_reported(count, gpus):
    machine = Maker(3).machine(count, slow=[1], gpus=gpus, links=count < 20)
    found = find_outliers(machine)
    assert {(one.kind, one.hosts) for one in found} == {("slow", ("host1",))}
    assert {one.what for one in found} >= {"float32 matrix product", "memory bandwidth"}
    assert all(one.by == pytest.approx(0.3, abs=0.06) for one in found)


def test_outlier_sentence_has_host_figure_and_peer_values():
    machine = Maker(3, noise=1e-4, apart=0).machine(3, slow=[2], links=False)
    told = next(one for one in find_outliers(machine) if one.what == "float32 matrix product")
    assert told.sentence == (
        "host2 is slow: float32 matrix product of its processors is 1.4 TFLOP/s, that of host0 "
        "and host1 2 TFLOP/s"
    )
    assert (told.value, told.peers) == ("1.4 TFLOP/s", "2 TFLOP/s")


def test_host_with_large_spread_is_reported_by_its_median():
    machine = Maker(3).machine(4, links=False)
    unsteady = Figure(1e12, 0.6e12, 1.2e12, 5, "FLOP/s")
    rates = tuple(
        replace(one, rate=unsteady) if one.precision == "float32" else one
        for one in machine.hosts[2].arithmetic
    )
    machine = with_host(machine, "host2", arithmetic=rates)
    assert {one.hosts for one in find_outliers(machine)} == {("host2",)}
    assert "1 TFLOP/s" in sentences(machine)


def importing(machine, name, again, busy, first=None, first_busy=None):
    """Return the machine with the import times of one host set."""
    changes = {"import_torch_first_s": first, "import_torch_first_busy_s": first_busy}
    for field, value in (("import_torch", again), ("import_torch_busy", busy)):
        changes[field] = Figure(value, 0.9 * value, 1.1 * value, 3, "s")
    return with_host(machine, name, **changes)


def test_slow_import_torch_is_reported_as_waiting_for_files():
    machine = Maker(3).machine(1, links=False)
    assert find_outliers(importing(machine, "host0", 3.9, 2.0, 3.95, 2.0)) == []
    (found,) = find_outliers(importing(machine, "host0", 12.0, 3.0, 40.0, 3.0))
    assert (found.kind, found.hosts, found.what) == ("import", ("host0",), "import torch")
    assert found.sentence == (
        "import torch waited 9 s of 12 s for files on host0: from one packed file it may be up "
        "to 4 times faster. HINT: paceline check --pack-env"
    )
    found = sentences(importing(machine, "host0", 2.5, 2.0, 4.4, 2.2))
    assert found.startswith("the first import torch waited 2.2 s of 4.4 s for files on host0: ")
    assert "up to 2 times faster" in found


def test_hosts_with_slow_import_torch_are_reported_once():
    machine = Maker(3).machine(4, links=False)
    for number, seconds in enumerate((10.0, 10.0, 10.2, 10.1)):
        machine = importing(machine, f"host{number}", seconds, 2.0)
    (found,) = find_outliers(machine)
    assert found.hosts == ("host0", "host1", "host2", "host3")
    assert (
        "8.2 s of 10.2 s for files on host0, host1, host2 and host3 (most on host2): "
        in found.sentence
    )


def test_difference_of_two_hosts_names_both():
    found = find_outliers(Maker(3).machine(2, slow=[1]))
    assert {(one.kind, one.hosts) for one in found} == {("slow", ("host0", "host1"))}
    assert found[0].sentence.startswith("host1 and host0 differ: ")
    assert "unknown which one is the outlier" in found[0].sentence


def test_difference_of_two_gpu_hosts_names_both():
    found = find_outliers(Maker(3).machine(2, slow=[0], gpus=4, links=False))
    assert {one.hosts for one in found} == {("host0", "host1")}
    assert len(found) == 10  # five figures each for processors and GPUs


def test_slow_gpu_is_reported_by_index():
    machine = Maker(3).machine(2, gpus=4, links=False)
    slow = Figure(1e12, 0.99e12, 1.01e12, 5, "FLOP/s")
    rates = tuple(
        replace(one, rate=slow)
        if (one.device, one.operation, one.precision) == ("cuda:2", "convolution", "float32")
        else one
        for one in machine.hosts[1].arithmetic
    )
    (found,) = find_outliers(with_host(machine, "host1", arithmetic=rates))
    assert found.hosts == ("host1",)
    assert "float32 convolution of its cuda:2 is 1 TFLOP/s, that of the others 2" in (
        found.sentence
    )


def test_hosts_with_another_processor_are_not_slow():
    machine = Maker(3).machine(8, slow=[6, 7])
    for name in ("host6", "host7"):
        machine = with_host(machine, name, processor="AMD EPYC 7742 64-Core Processor")
    (found,) = find_outliers(machine)
    assert (found.kind, found.hosts) == ("parts", ("host6", "host7"))
    assert found.sentence.startswith("host6 and host7 differ in processor: AMD EPYC 7742")


@pytest.mark.parametrize("count", [3, 4, 16, 48])
def test_slow_link_is_reported_by_its_hosts(count):
    maker = Maker(5)
    machine = with_links(
        maker.machine(count), maker, lambda a, b: 0.4 if (a, b) == ("host0", "host2") else 1
    )
    assert kinds(machine) == [("link", ("host0", "host2"))] * 2
    assert "the link between host0 and host2 is slow: bandwidth is " in sentences(machine)


@pytest.mark.parametrize("count", [3, 4, 16, 48])
def test_host_with_only_slow_links_is_reported_alone(count):
    maker = Maker(6)
    machine = with_links(maker.machine(count), maker, lambda a, b: 0.4 if "host1" in (a, b) else 1)
    assert kinds(machine) == [("link", ("host1",))] * 2
    assert "all links of host1 are slow: latency is " in sentences(machine)
    assert "HINT: check its network card" in sentences(machine)


def test_network_of_two_switches_is_reported_once():
    maker = Maker(7)
    far = {f"host{i}" for i in range(5)}
    machine = with_links(
        maker.machine(16), maker, lambda a, b: 0.5 if (a in far) != (b in far) else 1
    )
    found = [one for one in find_outliers(machine) if one.kind == "link"]
    assert len(found) <= 2
    assert all("as between hosts on different switches" in one.sentence for one in found)


def test_different_versions_are_reported():
    machine = Maker(8).machine(5, links=False)
    versions = {"python": "3.11.7", "torch": "2.5.1"}
    machine = with_host(machine, "host3", versions=versions)
    assert kinds(machine) == [("version", ("host3",))] * 2
    assert "host3 differs in torch: 2.5.1; most hosts: 2.6.0" in sentences(machine)
    assert "host3 differs in paceline: none; most hosts: 0.1.0" in sentences(machine)
    two = with_host(Maker(8).machine(2), "host1", versions=versions | {"paceline": "0.1.0"})
    assert sentences(two) == "hosts differ in torch: 2.6.0 on host0 and 2.5.1 on host1"


@pytest.mark.parametrize(
    ("used", "there", "limit", "said"),
    [
        ("DEFAULT", "AVX512", "default", "use no AVX on host1, whose processor has AVX512: ATEN_"),
        ("AVX2", "AVX512", "", "use AVX2 on host1, whose processor has AVX512: this build has no"),
        ("NO AVX", "AVX2", "", "HINT: install PyTorch's wheels"),
        ("DEFAULT", "SVE256", "", "use NEON on host1, whose processor has SVE256"),
        ("AVX512", "AVX512", "avx512", ""),
        ("AVX512", "AVX2", "", ""),
        ("DEFAULT", "DEFAULT", "", ""),
        ("VSX", "", "", ""),
        ("SOMETHING NEW", "AVX512", "", ""),
    ],
)
def test_idle_vector_units_are_reported(used, there, limit, said):
    build = {"capability": used, "processor": there, "limited_by": limit}
    machine = with_host(Maker(8).machine(2, links=False), "host1", torch_build=build)
    assert kinds(machine) == ([("vector", ("host1",))] if said else [])
    assert said in sentences(machine)


def test_missing_gpu_or_memory_is_reported():
    machine = Maker(9).machine(4, gpus=4, links=False)
    machine = with_host(machine, "host2", gpus=(Gpu(GPU),) * 3)
    machine = with_host(machine, "host1", memory_bytes=480 << 30)
    machine = with_host(machine, "host0", memory_bytes=(512 << 30) - (1 << 20))
    assert f"host2 differs in GPUs: 3 {GPU}; most hosts: 4 {GPU}" in sentences(machine)
    assert "host1 differs in memory: 480 GiB; most hosts: 512 GiB" in sentences(machine)
    assert len(find_outliers(machine)) == 2


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(nofile=1024), r"limit on open files is 1024 on host0: .*ulimit -n 4096"),
        (Limits(shm_bytes=64 << 20), r"/dev/shm is 64 MiB on host0: .*--shm-size"),
        (Limits(shm_bytes=9 << 30, shm_free_bytes=1 << 20), r"free /dev/shm is 1 MiB"),
        (Limits(memlock_bytes=65536), r"locked memory is 64 KiB on host0: mlx5_0 \(InfiniBand\)"),
    ],
)
def test_low_resource_limits_are_reported(limits, message):
    machine = with_host(Maker(1).machine(1), "host0", limits=limits)
    (found,) = find_outliers(machine)
    assert found.kind == "limit"
    assert re.search(message, found.sentence)


def test_sufficient_resource_limits_are_not_reported():
    machine = Maker(1).machine(2)
    plenty = Limits(UNLIMITED, UNLIMITED, UNLIMITED, 64 << 30, 60 << 30, UNLIMITED)
    machine = with_host(machine, "host0", limits=plenty)
    ethernet = (Network("eth0", "Ethernet", "100 GbE"),)
    machine = with_host(machine, "host1", networks=ethernet, limits=Limits(memlock_bytes=65536))
    assert find_outliers(machine) == []
    small = with_host(Maker(1).machine(1), "host0", limits=Limits(nofile=1024), threads=2)
    assert find_outliers(with_host(small, "host0", mask="0-1")) == []


def test_resource_limit_of_many_hosts_is_reported_once():
    machine = Maker(1).machine(16, links=False)
    for host in machine.hosts:
        machine = with_host(machine, host.name, limits=Limits(nofile=1024))
    assert "is 1024 on host0, host1, host2, host3 and 12 more: many ranks" in sentences(machine)
    assert len(find_outliers(machine)) == 1


def test_wrong_or_unknown_clock_offsets_are_reported():
    machine = Maker(1).machine(4, links=False)
    machine = with_host(machine, "host1", clock_offset_s=-3.2)
    machine = with_host(machine, "host2", clock_offset_s=None)
    machine = with_host(machine, "host3", clock_offset_s=2.0, clock_uncertainty_s=1.5)
    found = find_outliers(machine)
    assert [one.hosts for one in found] == [("host1",), ("host2",), ("host3",)]
    assert found[0].sentence.startswith("the clock of host1 is 3.2 s behind, and times of files")
    assert found[1].sentence == "the clock of host2 is not compared with the launcher's"
    assert found[2].sentence.endswith("is known only to 1.5 s")
    for name in ("host0", "host1", "host3"):
        machine = with_host(machine, name, clock_offset_s=None)
    (one,) = find_outliers(machine)
    assert one.hosts == ("host0", "host1", "host2", "host3")


def test_affinity_mask_missing_values_and_lost_hosts_are_reported():
    machine = replace(Maker(1).machine(2), unreachable={"host9": "no answer in 10 s"})
    machine = with_host(machine, "host1", mask="0-3", missing={"storage": "the folder is full"})
    assert sentences(machine) == (
        "host9 can't be reached: no answer in 10 s | storage is not known of host1: the folder is "
        "full | processes on host1 may run on only 4 of 128 hardware threads"
    )
