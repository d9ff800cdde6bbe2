"""``paceline report --timeline``: the trace that Perfetto and chrome://tracing open."""

import gzip
import json
import os
import subprocess
import threading
from collections import defaultdict

import pytest
from records import MS, Rank

from paceline.analyze.figures.report import analyse_with_window
from paceline.analyze.records.load_run import Run
from paceline.record.ring.states import PARTS_PER_CHUNK, Op, State
from paceline.report.trace import timeline
from paceline.report.trace.chrome_trace import lanes, microseconds
from paceline.security.text import printable

HOSTILE = 'a"b\\</script><script>alert(1)</script>\n\u2028\ud800'


def run_of(folder, size=2, steps=10, host="node{}", group="0", **meta):
    """Return ranks that compute 8 ms and all-reduce 2 ms a step; the last rank is 4 ms late."""
    late, whole = 4, 14
    for i in range(size):
        groups = {group: (size, i)}
        rank = Rank(folder, i, size, host=host.format(i % 2), clock="one", groups=groups, **meta)
        rank.step(0, 10)
        for step in range(1, steps + 1):
            at = 10 + whole * (step - 1)
            done = at + 8 + (late if i == size - 1 else 0)
            rank.was(State.INPUT, at, at + 1, step=step)
            rank.was(State.FORWARD, at + 1, at + 4, step=step)
            rank.was(State.BACKWARD, at + 4, at + 13.5, step=step)
            rank.collective(done - 1, done, at + 13.5, amount=1 << 20, group=group)
            rank.was(State.OPTIMIZER, at + 13.5, at + 14, step=step)
            rank.step(at, at + 14, samples=8, number=step)
        yield rank


def examined(ranks, command=(), steps=None):
    records = [rank.record() for rank in ranks]
    return analyse_with_window(Run("test", records, missing=[], command=list(command)), steps)


def trace(path):
    """Return the events of a file, checked as a viewer would.

    Slices of a thread are nested or disjoint, and each arrow begins and ends inside slices.
    """
    raw = path.read_bytes()
    data = json.loads(gzip.decompress(raw) if path.name.endswith(".gz") else raw)
    events = data["traceEvents"]
    slices, arrows = defaultdict(list), defaultdict(lambda: {"s": [], "f": []})
    for event in events:
        assert event["ph"] in ("M", "X", "s", "f", "i")
        if event["ph"] == "X":
            start, length = (int(event[name] * 1000) for name in ("ts", "dur"))
            slices[event["pid"], event["tid"]].append((start, start + length))
        elif event["ph"] in ("s", "f"):
            arrows[event["id"]][event["ph"]].append(event)
    for rows in slices.values():
        assert rows == sorted(rows, key=lambda row: (row[0], -row[1]))
        around = []
        for start, end in rows:
            while around and around[-1] <= start:
                around.pop()
            assert not around or end <= around[-1], "slices that partly overlap"
            around.append(end)
    for both in arrows.values():
        assert len(both["s"]) == 1
        assert len(both["f"]) >= 1
        for event in (*both["s"], *both["f"]):
            at = int(event["ts"] * 1000)
            inside = slices[event["pid"], event["tid"]]
            assert any(start <= at < end for start, end in inside), "an arrow to nowhere"
            assert event["ph"] == "s" or (event["bp"] == "e" and at > both["s"][0]["ts"] * 1000)
    return data


def threads(data):
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in data["traceEvents"]
        if event["name"] == "thread_name"
    }


def slices_in(data, name, pid=None):
    named = threads(data)
    return [
        event
        for event in data["traceEvents"]
        if event["ph"] == "X"
        and named[event["pid"], event["tid"]].split(" (")[0] == name
        and pid in (None, event["pid"])
    ]


def test_slice_durations_match_report_states(tmp_path):
    whole = examined(run_of(tmp_path, size=3))
    words = timeline.write(whole, tmp_path / "run.json")
    data = trace(tmp_path / "run.json")
    for pid, states in enumerate(whole.measured.states):
        told = defaultdict(int)
        for event in slices_in(data, "states", pid):
            told[event["name"]] += round(event["dur"] * 1000)
        assert told == {name: time for name, time in states.items() if time}
    steps = slices_in(data, "steps", 0)
    assert [event["name"] for event in steps] == [f"step {i}" for i in range(1, 11)]
    assert steps[0]["args"] == {"samples": 8}
    assert {e["name"] for e in slices_in(data, "phases")} == {
        *("input", "forward", "backward", "optimizer")
    }
    count = sum(event["ph"] != "M" for event in data["traceEvents"])
    assert words.startswith(f"{tmp_path}/run.json: steps 1 to 10 of 3 ranks, {count} events, 0.0")
    assert words.endswith("HINT: open it in https://ui.perfetto.dev or chrome://tracing")
    assert [path.name for path in tmp_path.glob("*json*")] == ["run.json"]


def test_ranks_are_processes_sorted_by_host(tmp_path):
    timeline.write(examined(run_of(tmp_path, size=4)), tmp_path / "run.json")
    about = [e for e in trace(tmp_path / "run.json")["traceEvents"] if e["ph"] == "M"]
    names = {e["pid"]: e["args"]["name"] for e in about if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in about if e["name"] == "process_sort_index"}
    assert names[2] == "rank 2 (node0)"
    assert sorted(order, key=order.get) == [0, 2, 1, 3]
    labels = {e["args"]["labels"] for e in about if e["name"] == "process_labels"}
    assert labels == {"node0", "node1"}


def test_arrows_point_from_late_rank_to_waiting_ranks(tmp_path):
    timeline.write(examined(run_of(tmp_path, size=3)), tmp_path / "run.json")
    data = trace(tmp_path / "run.json")
    starts = [event for event in data["traceEvents"] if event["ph"] == "s"]
    ends = [event for event in data["traceEvents"] if event["ph"] == "f"]
    assert [event["pid"] for event in starts] == [2] * 20
    assert sorted(event["pid"] for event in ends) == [0] * 10 + [1] * 10
    # The late rank starts 11 ms after the step's start; the others have waited since 8 ms.
    assert [event["ts"] for event in ends[:2]] == [11000, 25000]
    (first, *_) = slices_in(data, "waited for", 2)
    assert (first["ts"], first["dur"]) == (8000, 3000)
    assert first["args"]["by"] == "ranks 0-1"
    waits = [e for e in slices_in(data, "communication", 0) if e["name"] == "wait"]
    assert (waits[0]["ts"], waits[0]["dur"], waits[0]["args"]["for"]) == (8000, 3000, "rank 2")
    (flight, *_) = [e for e in slices_in(data, "communication", 0) if e["name"] == "all-reduce"]
    named = {"collective": "all-reduce", "group": "0", "number": 1, "step": 0}
    rate = pytest.approx((1 << 20) / 2.5e6, rel=0.01)
    assert flight["args"] == {**named, "bytes": 1 << 20, "GB/s": rate}


def test_no_late_rank_within_clock_residual(tmp_path):
    whole = examined(run_of(tmp_path))
    whole.measured.residual_ns = 5 * MS
    timeline.write(whole, tmp_path / "run.json")
    data = trace(tmp_path / "run.json")
    assert not [event for event in data["traceEvents"] if event["ph"] in ("s", "f")]
    assert not slices_in(data, "waited for")


def test_messages_have_arrows_and_overlapping_messages_have_lanes(tmp_path):
    ranks = [Rank(tmp_path, i, 2, clock="one") for i in range(2)]
    for rank, op in zip(ranks, (Op.SEND, Op.RECV), strict=True):
        rank.step(0, 10)
        for number, at in enumerate((20, 21, 22), 1):
            rank.message(at, at + 5 + number, at + 9 + number, op, op == Op.SEND, number)
        rank.was(State.FORWARD, 10, 60)
        rank.step(10, 60, number=1)
    timeline.write(examined(ranks), tmp_path / "run.json")
    data = trace(tmp_path / "run.json")
    names = [threads(data)[0, tid] for pid, tid in threads(data) if pid == 0]
    assert names[-3:] == ["communication", "communication (2)", "communication (3)"]
    messages = [event for event in data["traceEvents"] if event.get("cat") == "message"]
    assert [(e["ph"], e["pid"]) for e in messages] == [("s", 0)] * 3 + [("f", 1)] * 3
    assert {"send to 1", "recv from 0"} <= {e["name"] for e in data["traceEvents"]}


def test_steps_option_selects_range(tmp_path):
    ranks = [*run_of(tmp_path)]
    for given in (None, (4, 7)):
        words = timeline.write(examined(ranks, steps=given), tmp_path / "run.json", (4, 7))
        assert "steps 4 to 6 of 2 ranks" in words
        data = trace(tmp_path / "run.json")
        assert {e["name"] for e in slices_in(data, "steps")} == {"step 4", "step 5", "step 6"}
        states = slices_in(data, "states", 0)
        assert states[0]["ts"] == 0
        assert states[-1]["ts"] + states[-1]["dur"] == 3 * 14000
    with pytest.raises(
        ValueError, match=r"--steps 50:60 selects no step .*HINT: --steps 1:11 selects all"
    ):
        timeline.write(examined(ranks), tmp_path / "run.json", (50, 60))


def test_slices_beyond_range_are_cut_and_marked(tmp_path):
    ranks = [*run_of(tmp_path)]
    for rank in ranks:  # from step 3 to step 8
        rank.was(State.VALIDATION, 10 + 14 * 2 + 7, 10 + 14 * 7 + 7)
    timeline.write(examined(ranks), tmp_path / "run.json", (4, 7))
    phases = slices_in(trace(tmp_path / "run.json"), "phases")
    long = [event for event in phases if event["name"] == "validation"]
    assert {(e["ts"], e["dur"], e["args"]["cut_from_ms"]) for e in long} == {(0, 42000, 70)}


def test_gpu_kernels_have_threads_and_wait_arrows(tmp_path):
    """Synthetic kernels, as the profiler would record them."""
    ranks = [Rank(tmp_path, i, 2, clock="one") for i in range(2)]
    for i, rank in enumerate(ranks):
        rank.step(0, 10)
        for step in range(1, 4):
            at = 10 * step
            rank.was(State.KERNEL, at, at + 4 + 2 * i, amount=5, step=step)
            of = {"seq": step, "group": 1, "op": Op.ALL_REDUCE, "amount": 1 << 20, "step": step}
            rank.was(State.COMMUNICATION_KERNEL, at + 4 + 2 * i, at + 9, **of)
            rank.was(State.KERNEL, at + 9, at + 10, amount=1, step=step)
            rank.step(at, at + 10, number=step)
    words = timeline.write(examined(ranks), tmp_path / "run.json")
    assert "Left out: the CPU calls of collectives" in words
    data = trace(tmp_path / "run.json")
    assert slices_in(data, "kernels", 0)[0]["args"] == {"count": 5}
    waits = [e for e in slices_in(data, "communication", 0) if e["name"] == "wait"]
    assert [(e["ts"], e["dur"]) for e in waits] == [(4000, 2000), (14000, 2000), (24000, 2000)]
    assert len([event for event in data["traceEvents"] if event["ph"] == "f"]) == 3


def test_too_many_events_reduce_the_step_range_with_note(tmp_path, monkeypatch):
    whole = examined(run_of(tmp_path))
    monkeypatch.setattr(timeline, "MAX_EVENTS", 100)
    typical = whole.report.step_times.typical
    words = timeline.write(whole, tmp_path / "run.json")
    assert "of 1 to 10, the maximum that fits, of 2 ranks" in words
    assert "HINT: --steps FIRST:END selects other steps" in words
    data = trace(tmp_path / "run.json")
    shown = {event["name"] for event in slices_in(data, "steps")}
    assert f"step {typical}" in shown
    assert 2 <= len(shown) < 10
    count = sum(event["ph"] != "M" for event in data["traceEvents"])
    assert 60 < count <= 100
    assert data["otherData"]["of"] == "1 to 10"
    monkeypatch.setattr(timeline, "MAX_EVENTS", 1)  # at least one step remains
    assert f"step {typical} of 1 to 10" in timeline.write(whole, tmp_path / "run.json")


def test_script_lines_are_instant_events_or_reported_as_omitted(tmp_path, monkeypatch):
    ranks = [*run_of(tmp_path)]
    for at in (30, 31):
        ranks[0].was(State.SAMPLE, at, at, amount=7)
    records = [rank.record() for rank in ranks]
    records[0].lines[7] = {"number": 7, "file": f"/a/{HOSTILE}", "line": 3, "code": HOSTILE}
    whole = analyse_with_window(Run("test", records, missing=[]))
    assert "Left out" not in timeline.write(whole, tmp_path / "run.json")
    instants = [e for e in trace(tmp_path / "run.json")["traceEvents"] if e["ph"] == "i"]
    assert [event["ts"] for event in instants] == [20000, 21000]
    assert instants[0]["args"]["code"] == HOSTILE
    monkeypatch.setattr(timeline, "MAX_SAMPLES", 1)
    words = timeline.write(whole, tmp_path / "run.json")
    assert "Left out: the lines of the script (2 stack samples)." in words
    assert not [e for e in trace(tmp_path / "run.json")["traceEvents"] if e["ph"] == "i"]


def test_unaligned_host_clocks_have_no_arrows_and_are_reported(tmp_path):
    ranks = [Rank(tmp_path, i, 2, host=f"node{i}", groups={str(i): (1, 0)}) for i in range(2)]
    for rank in ranks:
        for step in range(3):
            rank.was(State.FORWARD, step * 10, step * 10 + 5)
            rank.collective(step * 10 + 5, step * 10 + 6, step * 10 + 9, group=next(iter(rank.seq)))
            rank.step(step * 10, step * 10 + 10, number=step)
    words = timeline.write(examined(ranks), tmp_path / "run.json")
    assert "could not be aligned" in words
    data = trace(tmp_path / "run.json")
    assert not [event for event in data["traceEvents"] if event["ph"] in ("s", "f")]
    assert {e["name"] for e in slices_in(data, "states")} >= {"useful", "wait or transfer"}


def test_gz_output_is_compressed(tmp_path):
    whole = examined(run_of(tmp_path))
    timeline.write(whole, tmp_path / "run.json")
    timeline.write(whole, tmp_path / "run.json.gz")
    assert trace(tmp_path / "run.json") == trace(tmp_path / "run.json.gz")
    assert (tmp_path / "run.json.gz").stat().st_size < (tmp_path / "run.json").stat().st_size / 4


def test_hostile_names_are_escaped(tmp_path):
    ranks = run_of(tmp_path, host="h{}" + HOSTILE, group=HOSTILE)
    timeline.write(examined(ranks, command=[HOSTILE]), tmp_path / "run.json")
    data = trace(tmp_path / "run.json")
    names = {e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"}
    assert names == {f"rank {i} (h{i}{printable(HOSTILE)})" for i in range(2)}
    assert {e["args"]["group"] for e in slices_in(data, "communication")} == {printable(HOSTILE)}
    assert data["otherData"]["command"] == HOSTILE
    (tmp_path / "run.json").read_text("ascii")


def test_missing_measurement_window_is_reported(tmp_path):
    rank = Rank(tmp_path, 0, 1)
    rank.was(State.FORWARD, 0, 10)
    with pytest.raises(ValueError, match=r"fewer than two optimizer steps.*HINT"):
        timeline.write(examined([rank]), tmp_path / "run.json")
    assert not (tmp_path / "run.json").exists()


def test_output_to_pipe_and_own_symlink(tmp_path):
    whole = examined(run_of(tmp_path))
    link, pipe = tmp_path / "latest", tmp_path / "pipe"
    link.symlink_to("named.json.gz")
    assert " MB. " in timeline.write(whole, link)
    expected = gzip.decompress((tmp_path / "named.json.gz").read_bytes())
    os.mkfifo(pipe)
    found = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert " MB" not in timeline.write(whole, pipe)
    reader.join(10.0)
    assert found == [expected]
    assert link.is_symlink()
    assert pipe.is_fifo()


def test_failed_write_keeps_old_file(tmp_path):
    whole = examined(run_of(tmp_path))
    for path, words in (
        (tmp_path / "no" / "run.json", "No such file"),
        (tmp_path, "is a directory"),
    ):
        with pytest.raises(ValueError, match=f"{words}.*HINT"):
            timeline.write(whole, path)
    full = tmp_path / "full"
    full.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(full)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no small file system can be mounted here")
    try:
        (full / "run.json").write_text("old")
        with pytest.raises(ValueError, match=r"run\.json: No space left on device\. HINT"):
            timeline.write(whole, full / "run.json")
        assert [path.read_text() for path in full.iterdir()] == ["old"]
    finally:
        subprocess.run(["umount", full], check=True)


def test_overlapping_slices_use_and_free_lanes():
    import numpy as np

    rows = [(0, 10, 1), (0, 4, 1), (2, 3, 2), (3, 12, 3), (5, 11, 1), (10, 12, 4)]
    start, end, key = (np.array(column) for column in zip(*rows, strict=True))
    assert lanes(start, end, key).tolist() == [0, 0, 1, 1, 2, 0]


def test_microseconds_preserve_nanosecond_precision():
    import numpy as np

    times = np.concatenate(
        [np.arange(200_000), np.random.default_rng(0).integers(0, 10**14, 10**5)]
    )
    texts = microseconds(times)
    assert [int(float(text) * 1000) for text in texts] == times.tolist()
    assert not any("e" in text for text in texts)
    assert sum(map(len, texts)) / len(texts) < 12


def test_micro_batches_of_a_pipeline_have_their_numbers(tmp_path):
    rank = Rank(tmp_path, 0, 1)
    rank.step(0, 10)
    for at, state, number, amount in (
        *((10, State.FORWARD, 1, 0), (20, State.FORWARD, 1, PARTS_PER_CHUNK)),
        *((30, State.BACKWARD, 1, 1), (40, State.BACKWARD, 1, 2), (50, State.BACKWARD, 2, 0)),
    ):
        rank.was(state, at, at + 9, seq=number, amount=amount)
    rank.step(10, 60, number=1)
    path = tmp_path / "trace.json"
    timeline.write(examined([rank]), path)
    assert {event["name"] for event in slices_in(trace(path), "phases")} == {
        *("forward 0", "forward 0, virtual stage 1", "backward 1"),
        *("backward of activations 0", "backward of parameters 0"),
    }
