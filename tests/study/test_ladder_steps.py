"""The number of training steps measured at a time, and the first run, which profiles operators."""

import pytest

from paceline.analyze.records.load_run import Run
from paceline.study.diagnose.ladder import _Climb, in_bursts
from paceline.study.diagnose.run_script import FailedError, RunRequest


@pytest.mark.parametrize(
    ("steps", "burst", "whole"),
    [(3, 2, 4), (10, 2, 10), (10, 4, 12), (3, 6, 6), (10, 0, 10), (10, 1, 10), (10, 40, 10)],
)
def test_measured_steps_are_rounded_up_to_whole_worker_bursts(steps, burst, whole):
    assert in_bursts(steps, burst) == whole


class FakeRunner:
    """Runs nothing: fails as if the script failed after ``failing`` steps of a profiled run."""

    def __init__(self, folder, failing=None):
        self.folder, self.failing = folder, failing
        self.rungs = []

    def run(self, alone, rung, count=False):
        self.rungs.append(rung)
        if rung.profiles and self.failing is not None:
            raise FailedError("it failed", self.failing, "RuntimeError: no such operator")
        return Run(str(self.folder), [], [])


def first_run(runner):
    return _Climb(RunRequest("train.py", [], [], [], warm=5), runner, 0.0)._first_run(10)


def test_script_that_fails_while_it_is_profiled_runs_again_without(tmp_path):
    runner = FakeRunner(tmp_path, failing=15)
    _, operators = first_run(runner)
    assert [rung.profiles for rung in runner.rungs] == [True, False]
    assert operators.notes == [
        "the script fails while its operators are profiled: RuntimeError: no such operator"
    ]


def test_script_that_fails_before_is_not_run_again(tmp_path):
    with pytest.raises(FailedError):
        first_run(FakeRunner(tmp_path, failing=14))


def test_script_that_ends_before_the_profile_is_reported(tmp_path):
    _, operators = first_run(FakeRunner(tmp_path))
    assert operators.files == []
    assert "ends after its first steps" in operators.notes[0]
