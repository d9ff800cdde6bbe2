"""Line profiles of synthetic ranks: shares add up, and waits are booked to the late rank's line."""

import json

import pytest
from records import MS, Rank

from paceline.analyze.diagnosis.line_profile import Doing, profile_of_runs
from paceline.analyze.figures.report import analyse_with_window
from paceline.analyze.records.load_run import load_run
from paceline.record.ring.states import State

FRAMES = [
    ("train.py", 1, "main", "loss = model(x)"),
    ("train.py", 2, "main", "loss.backward()"),
    ("train.py", 9, "extra", "total += k"),
    ("train.py", 3, "main", "extra()"),
    ("data.py", 5, "read", "file.read()"),
]
FORWARD, BACKWARD, EXTRA, READ = range(4)
STACKS = [
    {"frames": [0], "activity": "torch", "what": "torch.mm"},
    {"frames": [1], "activity": "torch", "what": "backward"},
    {"frames": [2, 3], "activity": "python", "what": ""},
    {"frames": [4], "activity": "file", "what": "/data/#.bin"},
]
PROFILE = {
    "version": 1, "interval_ns": MS, "start_ns": 0, "frames": FRAMES, "stacks": STACKS,
    "samples": [], "lost": 0, "executions": [], "workers": 0, "worker_ns": 0, "worker_times": [],
}  # fmt: skip


def write_profile(rank, samples, **changed):
    rank.path.with_suffix(".profile").write_text(
        json.dumps(PROFILE | changed | {"samples": samples})
    )


def sampled(stack, start, end):
    """Return a sample in each millisecond."""
    return [(at * MS + MS // 2, 0, stack, MS, 0, 0) for at in range(start, end)]


def made(folder, steps=6):
    """Write two ranks with steps of 40 ms; rank 1 does ``extra`` for 20 ms in every second step.

    Rank 0 waits for it in the all-reduce of its backward.
    """
    pair = [Rank(folder, number, 2, clock="one", run="a") for number in range(2)]
    for number, rank in enumerate(pair):
        samples = []
        rank.step(0, 10)
        for step in range(steps):
            begin, late = 10 + 40 * step, 20 if number and step % 2 else 0
            samples += sampled(EXTRA, begin, begin + late)
            rank.was(State.FORWARD, begin + late, begin + late + 10)
            samples += sampled(FORWARD, begin + late, begin + late + 10)
            end = begin + 35
            rank.was(State.BACKWARD, begin + late + 10, end)
            samples += sampled(BACKWARD, begin + late + 10, end)
            rank.collective(begin + late + 12, begin + late + 12, end, amount=1 << 20)
            rank.step(begin, begin + 40, samples=8, number=step + 1)
            samples.append(((begin + 36) * MS, 0, FORWARD, MS, 0, 0))
        write_profile(rank, samples)
        rank.path.write_bytes(rank.ring.snapshot())
    return folder


def profile_of(folder):
    run = load_run(folder)
    assert run.refused == []
    return profile_of_runs([analyse_with_window(run).measured], 0.04)


def test_shares_add_up_and_time_of_calls_is_included(tmp_path):
    profile = profile_of(made(tmp_path))
    for rank in (0, 1):
        of_rank = [share for entry, share in profile.times.items() if entry.rank == rank]
        assert sum(of_rank) == pytest.approx(1)
    lines = {(one.line.function, one.line.line): one for one in profile.lines()}
    assert sum(one.share for one in lines.values()) == pytest.approx(1)
    extra, caller = lines[("extra", 9)], lines[("main", 3)]
    assert extra.own[0] == 0
    assert extra.own[1] == pytest.approx(60 / 216, abs=0.03)
    assert caller.share == 0
    assert caller.inclusive == extra.own
    assert extra.doing == {Doing.PYTHON: extra.share}
    assert lines[("main", 2)].main_activity == Doing.COLLECTIVE


def test_waits_are_booked_to_the_line_of_the_late_rank(tmp_path):
    profile = profile_of(made(tmp_path))
    waited = profile.waited[1]
    (line,) = [line for line, share in waited.items() if share > 0.5 * sum(waited.values())]
    assert (line.function, line.line) == ("extra", 9)
    assert sum(waited.values()) == pytest.approx(60 / 240 / 2, abs=0.04)


def test_line_with_many_short_calls_of_torch_is_not_an_operator(tmp_path):
    folder = made(tmp_path)
    path = folder / "rank-0.profile"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"executions": [[0, 5000]]}))
    lines = {one.line.line: one for one in profile_of(folder).lines()}
    assert Doing.SHORT_CALLS in lines[1].doing
    assert Doing.TORCH not in lines[1].doing


def test_workers_are_kept_apart(tmp_path):
    folder = made(tmp_path)
    for number in (0, 1):
        path = folder / f"rank-{number}.profile"
        times = [{"stack": READ, "samples": 30, "ns": 30 * MS, "on_core_ns": 5 * MS}]
        changed = {"workers": 2, "worker_ns": 100 * MS, "worker_times": times}
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    profile = profile_of(folder)
    (worker,) = profile.worker_lines()
    assert (worker.line.file, worker.doing, worker.what) == ("data.py", Doing.FILE, "/data/#.bin")
    assert worker.share == pytest.approx(0.3)
    assert all(one.line.file != "data.py" for one in profile.lines())


DAMAGE = {
    "no JSON": "x",
    "unknown stack": PROFILE | {"samples": [[1, 0, 9, 0, 0, 0]]},
    "unknown frame": PROFILE | {"stacks": [{"frames": [9], "activity": "file", "what": ""}]},
    "unknown activity": PROFILE | {"stacks": [{"frames": [0], "activity": "x", "what": ""}]},
    "negative time": PROFILE | {"samples": [[-1, 0, 0, 0, 0, 0]]},
    "time beyond all limits": PROFILE
    | {"samples": [[1 << 59, 0, 0, 0, 0, 0]], "start_ns": 1 << 59},
    "unknown stack of workers": PROFILE
    | {"worker_times": [{"stack": 9, "samples": 1, "ns": 1, "on_core_ns": 1}]},
    "newer version": PROFILE | {"version": 99},
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_profile_is_left_out_and_named(tmp_path, kind):
    folder = made(tmp_path)
    damage = DAMAGE[kind]
    text = damage if isinstance(damage, str) else json.dumps(damage)
    (folder / "rank-1.profile").write_text(text)
    run = load_run(folder)
    assert run.records[1].profile is None
    assert "rank-1.profile" in run.refused[0]
    assert profile_of_runs([analyse_with_window(run).measured], 0.04) is None


def test_text_of_a_profile_is_made_printable(tmp_path):
    folder = made(tmp_path)
    path = folder / "rank-0.profile"
    changed = {"frames": [("a\x1b[31m.py", 1, "f\n", "x"), *FRAMES[1:]]}
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    line = load_run(folder).records[0].profile.lines[0]
    assert "\x1b" not in line.file
    assert "\n" not in line.function
