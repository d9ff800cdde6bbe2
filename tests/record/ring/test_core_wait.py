"""Run delays in a record: those of the training thread agree with the kernel's own counter."""

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import ranks

from paceline.analyze.figures.report import analyse
from paceline.analyze.records.load_run import Run
from paceline.analyze.records.read_record import parse_record
from paceline.record.ring import core_wait
from paceline.record.ring.core_wait import native_thread_id
from paceline.record.ring.recorder import Recorder
from paceline.record.ring.states import CoreWait, State

LATER = 1_000_000_000  # ns; no reading was as shortly before that none is due
BUSY = "import time\nwhile True: pass"
SCRIPT = f"""
    import os, subprocess, sys, time
    from pathlib import Path
    from paceline.record.ring.recorder import Recorder, now
    from paceline.record.ring.states import State

    def delay():
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])

    os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
    others = [
        subprocess.Popen([sys.executable, "-c", {BUSY!r}]) for _ in range(int(sys.argv[2]))
    ]
    recorder = Recorder(0, 1, folder=Path(sys.argv[1]))
    before = delay()
    while recorder.step < 20:
        start, end = now(), time.thread_time() + 0.02
        recorder.begin(State.FORWARD, start)
        while time.thread_time() < end:
            pass
        recorder.event(State.FORWARD, start, now())
        recorder.end_of_step()
    print(delay() - before)
    for other in others:
        other.kill()
        other.wait()
"""


@pytest.mark.parametrize("others", [0, 1])
def test_training_thread_waits_for_the_core_that_another_process_uses(tmp_path, others):
    script = ranks.write(tmp_path, SCRIPT)
    words = [sys.executable, script, tmp_path, others]
    result = ranks.run_command(words, tmp_path, ranks.environment(), timeout=60)
    assert result.returncode == 0, result.stderr
    (path,) = tmp_path.glob("*.ring")
    record = parse_record(path.read_bytes())
    waited = int(record.events_in(State.STARVED)["amount"].sum())
    assert waited == pytest.approx(int(result.stdout), rel=0.1, abs=3e7)
    report = analyse(Run("test", [record], missing=[]))
    if others:  # two processes on one core: half of the time, more if further ones use it
        assert 0.25 < report.states[0]["starved"] < 0.95
        assert report.losses[0].kind == "starved"
        assert report.losses[0].doing == "useful"
    assert sum(report.states[0].values()) == pytest.approx(1)


def test_waits_of_child_processes_are_sampled(monkeypatch):
    monkeypatch.setattr(core_wait, "SAMPLE_INTERVAL_NS", 100_000_000)
    events = []

    def event(state, start, end, amount, seq, peer):
        assert state == State.OTHERS_STARVED
        assert start < end
        if peer == CoreWait.CHILDREN:
            events.append((amount, seq))

    recorder = SimpleNamespace(training_thread=0, event=event)
    sampler = core_wait.OtherCoreWait(recorder)
    core = {min(os.sched_getaffinity(0))}
    children = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    try:
        for child in children:
            os.sched_setaffinity(child.pid, core)

        def both_were_sampled():
            sampler.sample(time.monotonic_ns())
            return any(delay > 0 and busy >= 2 for delay, busy in events)

        ranks.wait_until(both_were_sampled)
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_recorder_without_counters_of_the_kernel_records_all_else(tmp_path, monkeypatch):
    real = os.open

    def without_counters(path, *more, **options):
        if str(path).endswith("schedstat"):
            raise FileNotFoundError(2, "No such file", path)
        return real(path, *more, **options)

    monkeypatch.setattr(os, "open", without_counters)
    recorder = Recorder(0, 1, folder=tmp_path)
    recorder.event(State.FORWARD, 1, time.monotonic_ns() + LATER)
    record = parse_record(recorder.snapshot())
    assert record.count(State.FORWARD) == len(record.events) == 1


def test_script_that_closes_all_files_does_not_end_the_recording(tmp_path):
    recorder = Recorder(0, 1, folder=tmp_path)
    os.close(recorder.core_wait._schedule._fd)
    for state in (State.FORWARD, State.BACKWARD, State.OPTIMIZER):
        recorder.event(state, 1, time.monotonic_ns() + LATER)
    assert recorder.core_wait._schedule is None
    record = parse_record(recorder.snapshot())
    assert record.count(State.FORWARD, State.BACKWARD, State.OPTIMIZER) == 3


def test_threads_of_a_forked_process_are_found():
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        recorder = SimpleNamespace(training_thread=threading.get_ident())
        wait = core_wait.TrainingCoreWait(recorder)
        wait.read(time.monotonic_ns() + LATER)
        os.write(writer, f"{wait.reads} {threading.get_native_id()}".encode())
        os.write(writer, f" {native_thread_id(threading.get_ident())}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with open(reader) as file:
        reads, real, found = file.read().split()
    assert reads == "1"
    assert found == real
