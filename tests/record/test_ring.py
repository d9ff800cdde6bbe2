"""The ring file of a record: survives kill -9, is bounded, and invalid files are refused."""

import os
import platform
import signal
import subprocess
import sys
import textwrap

import pytest

from paceline.analyze.records.read_record import parse_record
from paceline.record.ring.recorder import Recorder
from paceline.record.ring.ring import HEADER_BYTES, Ring
from paceline.record.ring.states import Op, State

META = {
    "rank": 3,
    "size": 8,
    "host": "h",
    "started_ns": 1,
    "groups": {"2": {"name": "g", "size": 8, "rank": 3}},
}


def test_events_come_back_as_they_were_written(tmp_path):
    ring = Ring(tmp_path / "a.ring", META, capacity=10)
    ring.write(5, 9, State.INPUT, amount=7, seq=2**32 + 3, step=4, group=2, op=1, peer=-1)
    record = parse_record(ring.snapshot())
    assert record.meta == META
    assert record.lost == 0
    (event,) = record.events
    names = ("start", "end", "amount", "seq", "step", "group", "state", "op", "peer")
    assert [int(event[name]) for name in names] == [5, 9, 7, 3, 4, 2, 1, 1, -1]


def test_what_a_rank_has_begun_is_there_before_it_ends(tmp_path):
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


def test_a_record_of_version_2_has_not_begun_anything(tmp_path):
    ring = Ring(tmp_path / "a.ring", META, capacity=10)
    ring.write(5, 9, State.INPUT)
    data = bytearray(ring.snapshot())
    data[8] = 2
    record = parse_record(bytes(data))
    assert record.begun is None
    assert len(record.events) == 1


def test_it_says_where_and_with_what_it_ran(tmp_path):
    meta = parse_record(Recorder(0, 1, folder=tmp_path).snapshot()).meta
    assert int(meta["cores"], 16) == sum(1 << core for core in os.sched_getaffinity(0))
    assert meta["paceline"]
    assert meta["python"] == platform.python_version()


def test_a_full_ring_keeps_the_newest_and_says_what_it_lost(tmp_path):
    ring = Ring(tmp_path / "a.ring", META, capacity=8)
    for i in range(1, 22):
        ring.write(i, i, State.INPUT)
    record = parse_record(ring.snapshot())
    assert list(record.events["start"]) == list(range(14, 22))
    assert record.lost == 13


def test_the_record_survives_kill_9(tmp_path):
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
def test_foreign_and_cut_off_records_are_refused_by_name(tmp_path, damage, message):
    ring = Ring(tmp_path / "a.ring", META, capacity=10)
    ring.write(1, 2, State.INPUT)
    with pytest.raises(ValueError, match=f"some-file.*({message})"):
        parse_record(damage(ring.snapshot()), "some-file")


def test_no_room_is_an_error_and_not_a_crash(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"no room for the record.*No space left.*HINT"):
        Recorder(0, 1)


def test_a_recorder_leaves_no_file_behind_and_knows_its_cost():
    recorder = Recorder(0, 1)
    assert not [name for name in os.listdir("/dev/shm") if f"-{os.getpid()}-" in name]
    recorder.event(State.INPUT, 1, 2)
    recorder.end_of_step()
    record = parse_record(recorder.snapshot())
    assert len(record.events) == 2
    assert record.cost_ns > 0
    assert recorder.event_cost_ns > 0


def test_a_recorder_that_is_off_writes_nothing():
    recorder = Recorder(0, 1, enabled=False)
    recorder.event(State.INPUT, 1, 2)
    recorder.end_of_step()
    assert recorder.step == 1
    assert recorder.events == 0
    assert recorder.snapshot() == b""


def test_more_groups_than_the_header_holds_are_left_out_by_name(capsys):
    recorder = Recorder(0, 1)
    numbers = [recorder.new_group(f"group {number}", 4, 1) for number in range(1000)]
    assert numbers[:100] == list(range(1, 101))
    assert numbers[-1] == 0
    left_out = numbers.index(0)
    assert capsys.readouterr().err.count("warning") == 1
    assert len(parse_record(recorder.snapshot()).meta["groups"]) == left_out


def test_the_header_has_room_for_many_groups():
    recorder = Recorder(0, 1)
    for number in range(100):
        recorder.new_group(f"group {number}", 4, 1)
    assert len(parse_record(recorder.snapshot()).meta["groups"]) == 100
    assert HEADER_BYTES == 16384
