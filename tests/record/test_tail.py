"""The last events of records that are still being written."""

import itertools
import os
import subprocess
import threading

import pytest

from paceline.analyze.records.read_record import parse_record
from paceline.record.ring.ring import HEADER_BYTES, Ring
from paceline.record.ring.states import Op, State
from paceline.record.ring.tail import read_header, read_tail, read_tails

META = {"rank": 3, "size": 4, "host": "here", "started_ns": 1, "groups": {}}


def ring_with(folder, number, capacity=64, **more):
    ring = Ring(folder / "rank-3.ring", {**META, "pid": os.getpid()} | more, capacity)
    for i in range(number):
        ring.write(i + 1, i + 2, State.FORWARD, step=i)
    return ring


@pytest.mark.parametrize(
    ("written", "most", "steps"),
    [
        (0, 10, []),
        (5, 10, range(5)),
        (40, 10, range(30, 40)),
        (63, 100, range(63)),
        (70, 10, range(60, 70)),  # in two parts of the file
        (128, 10, range(118, 128)),  # up to the end of the file
        (100, 1000, range(37, 100)),  # the oldest event is where the rank writes next
    ],
)
def test_tail_returns_last_events_in_write_order(tmp_path, written, most, steps):
    record = parse_record(read_tail(ring_with(tmp_path, written).path, most))
    assert record.events["step"].tolist() == list(steps)
    assert (record.rank, record.lost, record.damaged) == (3, 0, 0)


def test_tail_includes_unfinished_event_and_overhead_without_reading_all(tmp_path):
    ring = ring_with(tmp_path, 1000, capacity=1 << 12)
    ring.cost_ns = 77
    ring.begin_writer(type("At", (), {"step": 9}))(State.BLOCKED, 55, 6, 1, Op.BARRIER)
    data = read_tail(ring.path, 10)
    assert len(data) == HEADER_BYTES + 10 * 40
    record = parse_record(data)
    assert record.cost_ns == 77
    assert (record.begun.since, record.begun.seq, record.begun.step) == (55, 6, 9)


def test_empty_files_and_other_attempts_are_skipped(tmp_path):
    ring_with(tmp_path, 3, attempt=1)
    (tmp_path / "rank-0.ring").write_bytes(bytes(HEADER_BYTES))  # created, but still empty
    (tmp_path / "rank-1.ring").write_bytes(b"")
    (found,) = read_tails(tmp_path, 10)
    assert (found.name, found.process) == ("rank-3.ring", "R")
    assert read_header(found.data)["attempt"] == 1
    assert found.now > 0
    assert not read_tails(tmp_path, 10, attempt=0)


def test_rank_with_invisible_pid_is_not_reported_as_ended(tmp_path):
    """A job runs in containers with PID namespaces of their own."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    ring_with(tmp_path, 3, pid=gone.pid)
    assert [found.process for found in read_tails(tmp_path, 10)] == ["?"]
    Ring(tmp_path / "rank-2.ring", {**META, "rank": 2, "pid": os.getpid()}, 64)
    assert [found.process for found in read_tails(tmp_path, 10)] == ["R", ""]


def test_tail_is_consistent_during_concurrent_writes(tmp_path):
    ring, over = ring_with(tmp_path, 0, capacity=4096), threading.Event()

    def write():
        at = 1
        while not over.is_set():
            ring.write(at, at + 1, State.FORWARD, step=at)
            at += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            steps = parse_record(read_tail(ring.path, 256)).events["step"].astype(int)
            assert all(b == a + 1 for a, b in itertools.pairwise(steps))
    finally:
        over.set()
        writer.join()
