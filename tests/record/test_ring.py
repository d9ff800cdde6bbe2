"""The ring file of a record: survives kill -9, is bounded, and invalid files are refused."""

import os
import platform
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import ranks

from paceline.analyze.records.read_record import parse_record
from paceline.record.ring import recorder as recorder_module
from paceline.record.ring.recorder import Recorder
from paceline.record.ring.ring import HEADER_BYTES, Ring
from paceline.record.ring.states import Op, State
from paceline.record.ring.tail import read_progress

META = {
    "rank": 3,
    "size": 8,
    "host": "h",
    "started_ns": 1,
    "groups": {"2": {"name": "g", "size": 8, "rank": 3}},
}


def test_events_round_trip(tmp_path):
    ring = Ring(tmp_path / "a.ring", META, capacity=10)
    ring.write(5, 9, State.INPUT, amount=7, seq=2**32 + 3, step=4, group=2, op=1, peer=-1)
    record = parse_record(ring.snapshot())
    assert record.meta == META
    assert record.lost == 0
    (event,) = record.events
    names = ("start", "end", "amount", "seq", "step", "group", "state", "op", "peer")
    assert [int(event[name]) for name in names] == [5, 9, 7, 3, 4, 2, 1, 1, -1]


def test_unfinished_event_is_in_the_record(tmp_path):
    ring = Ring(tmp_path / "a.ring", META, capacity=10)
    assert parse_record(ring.snapshot()).begun is None
    recorder = Recorder(0, 1, folder=tmp_path)
    recorder.step = 7
    recorder.begin(State.BLOCKED, 123, 2**32 + 5, 0, Op.ALL_REDUCE)
    begun = parse_record(recorder.snapshot()).begun
    assert (begun.since, begun.seq, begun.step) == (123, 5, 7)
    assert (begun.state, begun.op) == (State.BLOCKED, Op.ALL_REDUCE)
    with recorder.span(State.CHECKPOINT):
        assert parse_record(recorder.snapshot()).begun.state == State.CHECKPOINT
    recorder.clear()
    assert parse_record(recorder.snapshot()).begun is None


def test_record_of_version_2_has_no_unfinished_event(tmp_path):
    ring = Ring(tmp_path / "a.ring", META, capacity=10)
    ring.write(5, 9, State.INPUT)
    data = bytearray(ring.snapshot())
    data[8] = 2
    record = parse_record(bytes(data))
    assert record.begun is None
    assert len(record.events) == 1


def test_record_contains_cores_and_versions(tmp_path):
    meta = parse_record(Recorder(0, 1, folder=tmp_path).snapshot()).meta
    assert int(meta["cores"], 16) == sum(1 << core for core in os.sched_getaffinity(0))
    assert meta["paceline"]
    assert meta["python"] == platform.python_version()


def test_full_ring_keeps_newest_events_and_counts_lost(tmp_path):
    ring = Ring(tmp_path / "a.ring", META, capacity=8)
    for i in range(1, 22):
        ring.write(i, i, State.INPUT)
    record = parse_record(ring.snapshot())
    assert list(record.events["start"]) == list(range(14, 22))
    assert record.lost == 13


def test_record_survives_sigkill(tmp_path):
    script = textwrap.dedent(
        f"""
        import os, pathlib
        from paceline.record.ring.ring import Ring
        ring = Ring(pathlib.Path({str(tmp_path)!r}) / "a.ring", {META!r}, capacity=100)
        for i in range(1, 51):
            ring.write(i, i + 1, 1)
        os.kill(os.getpid(), 9)
        """
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
    assert len(parse_record((tmp_path / "a.ring").read_bytes()).events) == 50


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:100], "is not a record|cut off"),
        (lambda data: b"", "not a record"),
        (lambda data: b"somebody else's file" * 1000, "not a record of Paceline. HINT"),
        (lambda data: data[:-1], "cut off"),
        (lambda data: data[:8] + b"\xff\0\0\0" + data[12:], "version 255.*HINT"),
    ],
)
def test_invalid_and_truncated_records_are_rejected(tmp_path, damage, message):
    ring = Ring(tmp_path / "a.ring", META, capacity=10)
    ring.write(1, 2, State.INPUT)
    with pytest.raises(ValueError, match=f"some-file.*({message})"):
        parse_record(damage(ring.snapshot()), "some-file")


def test_full_disk_raises_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"no room for the record.*No space left.*HINT"):
        Recorder(0, 1)


KILLED = """
    import os, time
    from paceline.observe.attach import attach

    attach()
    time.sleep(1)  # several samples of the stack
    print(flush=True)
    time.sleep(1000)
"""


def test_killed_process_without_a_launcher_leaves_no_file(tmp_path):
    """Neither a ring nor the lines that its sampler saw, in /dev/shm and the temporary folder."""
    script = ranks.write(tmp_path, KILLED)
    places = (Path("/dev/shm"), tmp_path)
    process = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        env=ranks.environment(TMPDIR=str(tmp_path)),
    )
    process.stdout.readline()
    process.kill()
    process.communicate()
    names = [path.name for place in places for path in place.iterdir()]
    assert not [name for name in names if str(process.pid) in name or name.startswith("tmp")]


def test_recorder_without_a_folder_measures_its_overhead():
    recorder = Recorder(0, 1)
    assert recorder.path is None
    recorder.event(State.INPUT, 1, 2)
    recorder.end_of_step()
    record = parse_record(recorder.snapshot())
    assert record.count(State.INPUT, State.STEP) == 2
    assert record.cost_ns > 0
    assert recorder.event_cost_ns > 0


def test_disabled_recorder_writes_nothing():
    recorder = Recorder(0, 1, enabled=False)
    recorder.event(State.INPUT, 1, 2)
    recorder.end_of_step()
    assert recorder.step == 1
    assert recorder.events == 0
    assert recorder.snapshot() == b""


def test_groups_beyond_header_capacity_are_skipped_with_warning(capsys):
    recorder = Recorder(0, 1)
    numbers = [recorder.new_group(f"group {number}", 4, 1) for number in range(1000)]
    assert numbers[:100] == list(range(1, 101))
    assert numbers[-1] == 0
    left_out = numbers.index(0)
    assert capsys.readouterr().err.count("warning") == 1
    assert len(parse_record(recorder.snapshot()).meta["groups"]) == left_out


def test_header_holds_100_groups():
    recorder = Recorder(0, 1)
    for number in range(100):
        recorder.new_group(f"group {number}", 4, 1)
    assert len(parse_record(recorder.snapshot()).meta["groups"]) == 100
    assert HEADER_BYTES == 16384


def test_measuring_the_cost_of_an_event_is_no_step(tmp_path, monkeypatch):
    """The launcher may read the record while the recorder measures itself."""
    seen = []

    def measure(plain, recorded):
        recorded()
        seen.extend(read_progress(path)[2] for path in tmp_path.glob("rank-*.ring"))
        return 1.0

    monkeypatch.setattr(recorder_module, "measure_difference_ns", measure)
    recorder = Recorder(0, 1, folder=tmp_path)
    recorder.event(State.STEP, 1, 2)
    seen.extend(read_progress(path)[2] for path in tmp_path.glob("rank-*.ring"))
    assert seen == [0, 0, 1]
