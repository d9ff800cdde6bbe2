"""What is seen of the machine during a run: clock and load, from files of the kernel."""

import os
import threading

import pytest

from paceline.study.scale import machine_watch
from paceline.study.scale.machine_watch import MachineWatch


def write(folder, cores, mhz, busy):
    for core in cores:
        path = folder / f"cpu{core}/cpufreq"
        path.mkdir(parents=True, exist_ok=True)
        (path / "scaling_cur_freq").write_text(f"{1000 * mhz}\n")
    lines = [f"cpu{core} {busy} 0 0 77 5 0 0 0 0 0" for core in cores]
    (folder / "stat").write_text("\n".join(["cpu  1 2 3", *lines, "intr 5"]))


def test_clock_and_load_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_watch, "INTERVAL_S", 0.001)
    monkeypatch.setattr(machine_watch, "_children_s", lambda: 0.0)
    cores = sorted(os.sched_getaffinity(0))
    write(tmp_path, cores, 2400, 0)
    watch = MachineWatch(tmp_path, tmp_path / "stat")
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
    watch = MachineWatch(tmp_path, tmp_path / "stat")
    watch.start()
    found = watch.stop()
    assert (found.core_mhz, found.other_cores) == (None, None)
    assert any("clock frequency" in note for note in found.notes)
    assert any("load of other processes" in note for note in found.notes)
