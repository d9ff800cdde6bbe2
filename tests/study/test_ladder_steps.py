"""The number of training steps measured at a time, and the run that profiles operators."""

import pytest
from records import Rank

from paceline.analyze.diagnosis.ladder_results import Ladder
from paceline.analyze.records.load_run import Run
from paceline.record.ring.states import State
from paceline.study.diagnose import diagnose
from paceline.study.diagnose.ladder import profile_operators
from paceline.study.diagnose.plan import RoundCost, in_bursts
from paceline.study.diagnose.run_script import FailedError, RunRequest
from paceline.study.script_runs.run_process import Deadline


@pytest.mark.parametrize(
    ("steps", "burst", "whole"),
    [(3, 2, 4), (10, 2, 10), (10, 4, 12), (3, 6, 6), (10, 0, 10), (10, 1, 10), (10, 40, 10)],
)
def test_measured_steps_are_rounded_up_to_whole_worker_bursts(steps, burst, whole):
    assert in_bursts(steps, burst) == whole


class FakeRunner:
    """Runs nothing, or fails as if the script failed while it is profiled."""

    def __init__(self, folder, fails=False, left_s=100.0):
        self.folder, self.fails = folder, fails
        self.asked, self.deadline = (
            RunRequest("train.py", [], [], [], warm=5),
            Deadline.after(left_s),
        )
        self.rungs = []

    def run(self, alone, rung, named, limit_s):
        self.rungs.append(rung)
        if self.fails:
            raise FailedError("it failed", 15, "RuntimeError: no such operator")
        return Run(str(self.folder), [], [])


COST = RoundCost(start_s=1.0, step_s=0.01, phases=1)


def test_script_that_fails_while_it_is_profiled_is_reported(tmp_path):
    operators = profile_operators(FakeRunner(tmp_path, fails=True), COST, None)
    assert operators.files == []
    assert operators.notes == [
        "the script fails while its operators are profiled: RuntimeError: no such operator"
    ]


def test_script_that_ends_before_the_profile_is_reported(tmp_path):
    operators = profile_operators(FakeRunner(tmp_path), COST, None)
    assert operators.files == []
    assert "ends after its first steps" in operators.notes[0]


def test_profile_takes_fewer_steps_of_a_short_script_and_none_without_time(tmp_path):
    runner = FakeRunner(tmp_path)
    profile_operators(runner, COST, 12)
    assert (runner.rungs[0].warm, runner.rungs[0].steps) == (1, 3)
    runner = FakeRunner(tmp_path, left_s=3.0)
    assert "there is no time" in profile_operators(runner, COST, None).notes[0]
    assert runner.rungs == []


def test_report_of_a_gpu_is_that_of_the_run_with_kernels(tmp_path, monkeypatch):
    runs = []
    for name in ("first", "round"):
        (tmp_path / name).mkdir()
        rank = Rank(tmp_path / name, 0, 1)
        for step in range(8):
            rank.was(State.FORWARD, 100 * step, 100 * step + 90)  # launches, or waits for the GPU
            if name == "first":
                rank.was(State.INPUT, 100 * step + 90, 100 * step + 100)
                rank.was(State.KERNEL, 100 * step + 20, 100 * step + 80)
            rank.step(100 * step, 100 * step + 100, number=step)
        runs.append(Run(name, [rank.record()], missing=[]))
    ladder = Ladder(2, 4, {"silent": [], "cached": [], "everything": []}, runs[1], runs[0])
    monkeypatch.setattr(diagnose, "climb_ladder", lambda *_: ladder)
    found = diagnose.run_diagnosis(RunRequest("train.py", []), print)
    assert found.report.states[0]["input"] > 0.05
    assert 0.55 < found.report.states[0]["useful"] < 0.7
