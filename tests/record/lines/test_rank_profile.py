"""The profile of a rank: written beside its ring, with the samples of its loader workers."""

import sys
import time

from paceline.analyze.records.rank_lines import read_rank_lines
from paceline.record.experiments.lines.activity import StackTable
from paceline.record.experiments.lines.rank_profile import (
    RankProfile,
    WorkerProfile,
    WorkerProfiles,
    interval_for,
)
from paceline.record.ring.recorder import Recorder
from paceline.record.ring.resource_usage import FileOpenCounter


def reads(path, seconds=0.5):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        with open(path, "rb") as file:
            file.read()


def counts(seconds=0.3):
    end, total = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        total += 1


def made(folder):
    path = folder / "sample_0042.bin"
    path.write_bytes(bytes(8_000_000))
    return Recorder(0, 1, folder=folder), FileOpenCounter(), path


def test_profile_of_the_measured_phase_is_written_with_lines_paths_and_executions(tmp_path):
    recorder, opened, path = made(tmp_path)
    profile = RankProfile(recorder, opened)
    profile.start(is_kept=False, expected_s=0.5)
    counts()
    profile.stop()
    profile.start(is_kept=True, expected_s=0.5)
    reads(path)
    profile.stop()
    profile.start_counting()
    reads(path, 0.1)
    profile.write()
    found = read_rank_lines(recorder.path.with_suffix(".profile"))
    functions = {line.function for line in found.lines}
    assert "reads" in functions
    assert "counts" not in functions  # not of the measured phase
    whats = {stack.what for stack in found.stacks if stack.activity == "file"}
    assert str(tmp_path / "sample_#.bin") in whats
    read = next(n for n, line in enumerate(found.lines) if line.code == "file.read()")
    assert found.executions[read] >= 1
    assert (found.weight > 0).all()
    assert not (tmp_path / "rank.profile.part").exists()


def test_samples_of_workers_are_added_to_the_profile(tmp_path):
    recorder, opened, path = made(tmp_path)
    workers = WorkerProfiles(recorder, opened)
    workers.find_folder()
    worker = WorkerProfile(workers, sys._getframe().f_code)
    worker.start()
    counts()  # before the measured steps
    workers.is_on = True
    reads(path)
    worker.end()
    workers.is_on = False
    table = StackTable()
    count, whole_ns, times = workers.collect(table)
    assert count == 1
    assert whole_ns >= sum(one["ns"] for one in times) > 0.2e9
    assert {places[0][2] for places, _, _ in table.described if places} == {"reads"}
    assert list(tmp_path.glob("*.worker-*")) == []


def test_short_phases_are_sampled_more_often():
    assert interval_for(0.01) == 0.005
    assert interval_for(1.5) == 0.005
    assert interval_for(100) == 0.01


def test_failure_of_the_profile_does_not_reach_the_script(tmp_path, monkeypatch, capsys):
    recorder, opened, _ = made(tmp_path)
    profile = RankProfile(recorder, opened)
    monkeypatch.setattr(profile, "_take", None)
    monkeypatch.setattr(profile, "_workers", None)
    profile.start(is_kept=True, expected_s=1.0)
    profile.stop()
    profile.write()
    assert profile.has_failed
