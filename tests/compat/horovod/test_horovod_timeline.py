"""The timeline: a Chrome trace of negotiation and exchange, written by rank 0."""

import json
import threading
import time

import pytest
import ranks

from paceline.compat.horovod import timeline
from paceline.compat.horovod.timeline import Timeline, start_timeline, stop_timeline


def events(path):
    return json.loads(path.read_text())


def test_file_is_json_after_every_write(tmp_path):
    path = tmp_path / "t.json"
    made = Timeline(path)
    assert len(events(path)) == 1  # the start
    now = time.monotonic_ns()
    made.slice("a", "NEGOTIATE_ALLREDUCE", now, now + 5_000, dtype="float32")
    made._flush()
    made.ready("b", 3, now)
    made._flush()
    found = events(path)
    made.close()
    assert found == events(path)
    (drawn,) = [one for one in found if one["name"] == "NEGOTIATE_ALLREDUCE"]
    assert (drawn["dur"], drawn["args"]) == (5.0, {"dtype": "float32"})
    names = {one["pid"]: one["args"]["name"] for one in found if "name" in one.get("args", {})}
    assert names[drawn["pid"]] == "a"
    (tick,) = [one for one in found if one["name"] == "3"]
    assert names[tick["pid"]] == "b"


def test_cycles_are_marked_on_request(tmp_path):
    for marked in (True, False):
        made = Timeline(tmp_path / "t.json", marked)
        made.cycle(time.monotonic_ns())
        made.close()
        assert (events(tmp_path / "t.json")[-1]["name"] == "CYCLE_START") is marked


def test_threads_can_write_at_once(tmp_path):
    made = Timeline(tmp_path / "t.json")

    def write(name):
        for _ in range(500):
            made.slice(name, "ALLREDUCE", time.monotonic_ns(), time.monotonic_ns())

    threads = [threading.Thread(target=write, args=(f"t{n}",)) for n in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    made.close()
    made.slice("late", "ALLREDUCE", 0, 0)  # of a thread that is still running
    assert sum(one["name"] == "ALLREDUCE" for one in events(tmp_path / "t.json")) == 2000


def test_second_timeline_ends_the_first(tmp_path):
    start_timeline(tmp_path / "1.json")
    first = timeline.active
    start_timeline(str(tmp_path / "2.json"))
    assert timeline.active is not first
    assert first._file.closed
    stop_timeline()
    stop_timeline()
    assert timeline.active is None


def test_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none/t\.json can't be written: .* HINT: "):
        start_timeline(tmp_path / "none/t.json")
    (tmp_path / "t.json").mkdir()
    with pytest.raises(ValueError, match="Is a directory"):
        start_timeline(tmp_path / "t.json")
    assert timeline.active is None


def test_full_file_system_ends_the_timeline_and_not_the_training(tmp_path, capsys, monkeypatch):
    made = Timeline(tmp_path / "t.json")

    def flush():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(made, "_flush", flush)
    monkeypatch.setattr(timeline, "FLUSH_INTERVAL_NS", -1)
    made.slice("a", "ALLREDUCE", 0, 1)
    made.slice("a", "ALLREDUCE", 0, 1)
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_job_writes_phases_of_each_tensor(tmp_path):
    script = """
        import torch, horovod.torch as hvd
        hvd.init()
        for _ in range(2):
            hvd.allreduce(torch.ones(4), name="loss")
        hvd.start_timeline("second.json", mark_cycles=True)
        hvd.broadcast(torch.ones(2), 0, name="weights")
        hvd.stop_timeline()
        hvd.allreduce(torch.ones(4), name="unseen")
    """
    done = ranks.run(
        ranks.write(tmp_path, script),
        HOROVOD_TIMELINE="first.json",
        HOROVOD_CONTROLLER="gloo",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("HOROVOD_CONTROLLER: no effect") == 1
    first = events(tmp_path / "first.json")
    phases = [one["name"] for one in first if one["ph"] == "X"]
    assert phases.count("NEGOTIATE_ALLREDUCE") == phases.count("ALLREDUCE") == 2
    assert {"0", "1"} <= set(phases)  # both ranks became ready
    assert not any("weights" in str(one) for one in first)
    second = events(tmp_path / "second.json")
    assert {"NEGOTIATE_BROADCAST", "BROADCAST", "CYCLE_START"} <= {one["name"] for one in second}
    assert "unseen" not in str(second)
