"""What is seen of the machine during a run: clock and load, from files of the kernel."""

import os
import subprocess
import sys
import threading

import pytest
import ranks

from paceline.study.scale import run_setup
from paceline.study.scale.daemon_processes import DaemonProcesses, marked_processes
from paceline.study.scale.run_setup import MachineWatch


def write(folder, cores, mhz, busy):
    for core in cores:
        path = folder / f"cpu{core}/cpufreq"
        path.mkdir(parents=True, exist_ok=True)
        (path / "scaling_cur_freq").write_text(f"{1000 * mhz}\n")
    lines = [f"cpu{core} {busy} 0 0 77 5 0 0 0 0 0" for core in cores]
    (folder / "stat").write_text("\n".join(["cpu  1 2 3", *lines, "intr 5"]))


def test_clock_and_load_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(run_setup, "INTERVAL_S", 0.001)
    monkeypatch.setattr(run_setup, "_children_s", lambda: 0.0)
    cores = sorted(os.sched_getaffinity(0))
    write(tmp_path, cores, 2400, 0)
    watch = MachineWatch(cpus=tmp_path, stat=tmp_path / "stat")
    sampled = threading.Event()
    original = watch._mhz

    def mhz(core):
        sampled.set()
        return original(core)

    watch._mhz = mhz
    watch.start()
    assert sampled.wait(30)
    write(tmp_path, cores, 2400, 1 << 40)
    found = watch.stop()
    assert found.core_mhz == pytest.approx(2400)
    assert found.core_mhz_low == pytest.approx(2400)
    assert found.other_cores > 1000
    assert not found.notes


def test_what_cannot_be_read_is_said(tmp_path):
    watch = MachineWatch(cpus=tmp_path, stat=tmp_path / "stat")
    watch.start()
    found = watch.stop()
    assert (found.core_mhz, found.other_cores) == (None, None)
    assert any("clock frequency" in note for note in found.notes)
    assert any("load of other processes" in note for note in found.notes)


MARKED = """
import os, sys, time
if os.fork():
    os._exit(0)  # the other process has no ancestor among those of the test
os.setsid()
child = os.fork()
while time.process_time() < 0.3:
    pass
if child:
    os.waitpid(child, 0)
    print("done", os.getpid(), flush=True)
    sys.stdin.read()
os._exit(0)
"""


def start_outside(command):
    """Start a process that is no descendant of this one, as a daemon does; return its pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_ranks_that_a_daemon_has_started_are_no_other_load():
    with marked_processes():
        mine, other = DaemonProcesses(), DaemonProcesses()
        other._mark = "another study"
        outside = start_outside(MARKED)
        for one in (mine, other):
            one.sample()
        assert outside.stdout.readline().startswith("done")
        for one in (mine, other):
            one.sample()
        outside.communicate("")  # it ends: its time remains known
        ranks.wait_until(lambda: mine.sample() or not mine._members)
    assert mine.found
    assert not other.found
    assert mine.seconds == pytest.approx(0.6, abs=0.25)
    assert other.seconds == 0


def test_descendants_count_once():
    with marked_processes():
        found = DaemonProcesses()
        with subprocess.Popen(["sleep", "60"]) as child:
            found.sample()
            child.kill()
    assert not found.found


def test_unknown_ranks_of_a_daemon_are_said(tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    write(tmp_path, cores, 2400, 0)
    watch = MachineWatch(by_daemon=True, cpus=tmp_path, stat=tmp_path / "stat")
    watch.start()
    found = watch.stop()
    assert found.other_cores is None
    assert any("the scheduler starts the ranks" in note for note in found.notes)
