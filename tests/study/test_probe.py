"""Measurements of a check.

Figures agree with a second way to measure them. Unusable folders and hosts that do not answer are
reported. One test runs the whole check as a real job.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch
from torch._C._distributed_c10d import HashStore

from paceline.cost.machine.dataclass_tree import from_tree
from paceline.cost.machine.machine_file import HostFacts, Machine
from paceline.record.hooks.sampled_steps import uses_tf32
from paceline.study.probe.__main__ import Summary
from paceline.study.probe.measure.device_speed import _tf32, arithmetic, last_level_caches, triad
from paceline.study.probe.measure.import_time import HOOK, import_torch
from paceline.study.probe.measure.links import EVERY_PAIR, apart, rounds
from paceline.study.probe.measure.page_cache import drop_from_cache, resident_share
from paceline.study.probe.measure.storage import storage
from paceline.study.probe.participants import (
    HostDropped,
    MeasurementResults,
    Participants,
    ProbeHost,
    group_ranks_by_host,
)


def best(call, repetitions=7):
    """Return the time of the fastest call in seconds; other processes use this machine as well."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def agrees(one, other, factor):
    return other / factor < one < other * factor


@pytest.mark.alone
def test_matrix_product_rate_matches_numpy():
    found = {(a.operation, a.precision): a.rate for a in arithmetic("cpu", 0.05, threads=1)}
    assert len(found) == 6
    a, b = np.random.rand(2, 512, 512)
    seconds = best(lambda: a @ b)
    # numpy's BLAS may use all cores.
    rate = found["matrix product", "float64"]
    assert agrees(rate.high, 2 * 512**3 / seconds, 4 * len(os.sched_getaffinity(0)))
    for precision in ("float32", "float64", "bfloat16"):
        assert found["convolution", precision].median > 0
    assert rate.n >= 5
    assert found["matrix product", "float32"].high > rate.low


@pytest.mark.alone
def test_triad_bandwidth_matches_numpy():
    before = torch.get_num_threads()
    cpus = sorted(os.sched_getaffinity(0))
    found = triad("cpu", 0.2, cpus, threads=1).triad
    assert torch.get_num_threads() == before
    n = 1 << 24  # larger than any cache
    a, b, c = np.zeros(n), np.ones(n), np.ones(n)

    def numpys():
        np.multiply(c, 3.0, out=a)
        np.add(a, b, out=a)

    # numpy moves the bytes of five arrays in two passes, the triad those of three.
    assert agrees(found.high, 5 * 8 * n / best(numpys), 3)


def test_shared_caches_are_counted_once(tmp_path):
    for cpu in range(4):
        for index, (level, kind, size, shared) in enumerate(
            [
                (1, "Instruction", "32K", cpu),
                (1, "Data", "32K", cpu),
                (3, "Unified", "32M", cpu // 2),
            ]
        ):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            folder.mkdir(parents=True)
            for name, value in (("level", level), ("type", kind), ("size", size)):
                (folder / name).write_text(f"{value}\n")
            (folder / "shared_cpu_list").write_text(f"{shared}\n")
    assert last_level_caches([0, 1], tmp_path) == 32 << 20
    assert last_level_caches([0, 1, 2, 3], tmp_path) == 64 << 20


def test_file_is_in_page_cache_until_dropped(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        file.read()
        assert resident_share(file.fileno()) == 1.0
        drop_from_cache(file.fileno())
        assert resident_share(file.fileno()) in (
            0.0,
            1.0,
        )  # 1.0 if the folder is in memory


def test_storage_measurement_leaves_folder_unchanged(tmp_path):
    (tmp_path / "mine").write_text("mine")
    found = storage(tmp_path, 0.2)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    for figure in (found.write, found.read, found.cached_read):
        assert 1e5 < figure.median < 1e12
    assert found.small_create.median > 10 < found.small_read.median
    assert found.filesystem
    if found.cache == "out":
        assert found.read.median < found.cached_read.median


def test_storage_in_memory_is_reported():
    assert storage(Path("/dev/shm"), 0.05).cache == "in"


def test_terminated_storage_measurement_leaves_no_files(tmp_path):
    code = f"""
import signal, sys
from pathlib import Path
from paceline.launch.linux_processes import exit_on_signal, signals_handled
from paceline.study.probe.measure.storage import storage
print("begun", flush=True)
with signals_handled(exit_on_signal, (signal.SIGTERM,)):
    storage(Path({str(tmp_path)!r}), 60.0)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        ranks.wait_until(lambda: list(tmp_path.glob(".paceline-check-*/large-*")))
        process.terminate()
        assert process.wait(timeout=20) == 128 + 15
    finally:
        process.kill()
    assert list(tmp_path.iterdir()) == []


def test_unusable_folder_is_rejected_with_hint(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--data .*/none: does not exist on this host\. HINT: "):
        storage(tmp_path / "none", 0.1)
    with pytest.raises(ValueError, match=r"--data .*/file: is not a folder\. HINT: "):
        storage(tmp_path / "file", 0.1)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_read_only_and_full_folder_are_reported(tmp_path):
    @contextlib.contextmanager
    def mounted(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(tmp_path)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("this container may not mount")
        try:
            yield
        finally:
            subprocess.run(["umount", str(tmp_path)], check=True)

    with (
        mounted("ro"),
        pytest.raises(ValueError, match=r"can't be written to: Read-only file .* HINT"),
    ):
        storage(tmp_path, 0.1)
    with (
        mounted("size=1m"),
        pytest.raises(ValueError, match=r"has 1\.0 MiB free, .* HINT: free space"),
    ):
        storage(tmp_path, 0.1)
    with mounted("size=128m,nr_inodes=60"):  # no call reports this limit in advance
        with pytest.raises(ValueError, match=r"No space left on device while measuring\. HINT"):
            storage(tmp_path, 0.1)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_import_torch_is_timed_and_its_file_calls_counted(monkeypatch):
    found = import_torch(1)
    assert found.seconds.n == 1
    assert 0.1 < found.first_s == found.seconds.median
    assert found.calls > 100
    if shutil.which("strace"):
        assert found.calls > 2000
    assert found.counted_by
    with pytest.raises(ValueError, match="ended with exit code 1"):
        import_torch(1, interpreter=shutil.which("false"), count=False)


@pytest.mark.parametrize("count", [2, 3, 8, 31, 32])
def test_host_pairs_are_unique_and_rounds_are_disjoint(count):
    found = [pair for one in rounds(count) for pair in one]
    assert sorted(found) == [(i, j) for i in range(count) for j in range(i + 1, count)]
    for one in rounds(count):
        assert len({host for pair in one for host in pair}) == 2 * len(one)


def test_only_neighbours_and_some_pairs_of_many_hosts_are_measured():
    count = EVERY_PAIR + 9
    found = [pair for one in rounds(count) for pair in one]
    assert len(set(found)) == len(found) < 15 * count
    assert {(i, i + 1) for i in range(count - 1)} | {(0, count - 1)} <= set(found)


def test_pairs_on_one_machine_are_measured_in_separate_rounds():
    assert apart([(0, 1), (2, 3)], ["a", "b", "c", "d"]) == [[(0, 1), (2, 3)]]
    assert apart([(0, 1), (2, 3)], ["a", "b", "a", "d"]) == [[(0, 1)], [(2, 3)]]
    assert apart([(0, 1), (2, 3)], ["a"] * 4) == [[(0, 1)], [(2, 3)]]


def about(host, name, machine, cpu=0):
    return {"host": host, "name": name, "machine": machine, "cpus": [cpu], "gpu": ""}


def test_hosts_on_one_machine_get_turns_and_unique_names():
    found = group_ranks_by_host(
        [
            about("0", "a", "m", 0),
            about("0", "a", "m", 1),
            about("1", "a", "m"),
            about("2", "b", "n"),
        ]
    )
    assert [(h.name, h.turn, h.ranks, h.cpus) for h in found] == [
        ("a", 0, (0, 1), (0, 1)),
        ("a (2)", 1, (2,), (0,)),
        ("b", 0, (3,), (0,)),
    ]


def test_silent_host_is_reported_and_others_continue():
    store, ends = HashStore(), {}

    def one(rank):
        participants = Participants(store, rank, 3, about(str(rank), f"host{rank}", f"m{rank}"))

        def work():
            if rank == 1:
                time.sleep(1.0)
            if rank == 2:
                raise OSError("the card is broken")
            return rank

        try:
            said = participants.measure("work", work, 0.3)
            again = participants.measure("again", lambda: rank, 5.0)
            ends[rank] = (
                said,
                again,
                participants.unresponsive,
                [host.name for host in participants.hosts],
            )
        except HostDropped:
            ends[rank] = "dropped"

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    said, again, silent, left = ends[0]
    assert (said.values, said.errors) == ({"host0": 0}, {"host2": "OSError: the card is broken"})
    assert again.values == {"host0": 0, "host2": 2}
    assert silent == {"host1": "no answer within 0 s (measurement: work)"}
    assert left == ends[2][3] == ["host0", "host2"]
    assert ends[1] == "dropped"


@pytest.mark.long  # test_check.py runs a similar check, without the missing folder
def test_probe_job_measures_complete_machine(tmp_path):
    probe = ranks.BIN / "paceline"
    words = [probe, "run", "-n", "2", "--json", "found.json", "-m", "paceline.study.probe"]
    words += ["--seconds", "2", "--quick", "--data", str(tmp_path / "none")]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=100, cwd=tmp_path, env=ranks.environment()
    )
    assert done.returncode == 0, done.stderr
    assert "paceline check: arithmetic ...\n" in done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    [note] = found["notes"]
    assert note["measure"] == "storage"
    assert "does not exist" in note["text"]
    parts = {key: found[key] for key in ("hosts", "collectives", "pairs", "unreachable")}
    unknown = []
    machine = from_tree(
        Machine, {"version": 1, "made": "2026-01-31T12:00:00Z", **parts}, "", unknown
    )
    assert unknown == ["hosts[0].more"]
    [host] = machine.hosts
    assert isinstance(host, HostFacts)
    assert host.ranks == 2
    assert set(host.cpus) <= os.sched_getaffinity(0)
    assert host.versions["torch"] == torch.__version__
    assert host.torch_build["capability"] == torch.backends.cpu.get_cpu_capability()
    assert host.missing["storage"] == note["text"]
    assert len(host.arithmetic) == 6
    assert host.memory[0].triad.median > 1e8
    assert host.import_torch_calls > 100
    assert found["hosts"][0]["more"]["import_torch_calls_by"] == HOOK
    operations = {one.operation: one for one in machine.collectives}
    assert set(operations) == {"all-reduce", "all-gather", "reduce-scatter", "all-to-all"}
    for one in operations.values():
        assert (one.group, one.ranks, one.hosts) == ("in host", 2, (host.name,))
        assert one.sizes[0].bytes == 4096
        assert 1e-6 < one.latency.median < 1
        assert one.busbw(one.sizes[-1]).median > 1e5


def test_hosts_at_several_leaf_switches_are_noted():
    hosts = [ProbeHost(name, name, 0, (rank,), (0,), False) for rank, name in enumerate("ab")]
    for switches, noted in ((("s0.s1", "s0.s2"), True), (("s0.s1", "s0.s1"), False)):
        summary = Summary(hosts, None)
        more = {
            name: [{}, {"leaf_switch": switch}] for name, switch in zip("ab", switches, strict=True)
        }
        summary.facts(MeasurementResults(more, {}))
        notes = summary.as_json({})["notes"]
        assert [note["measure"] for note in notes] == ["switches"] * noted
        assert not noted or "2 leaf switches (s1: a; s2: b)" in notes[0]["text"]


def test_tf32_is_set_for_products_and_convolutions_and_restored():
    def allowed():
        return uses_tf32(is_convolution=False), uses_tf32(is_convolution=True)

    before = allowed()
    for wanted in (True, False):
        with _tf32("cuda:0", wanted):
            assert allowed() == (wanted, wanted)
    assert allowed() == before
