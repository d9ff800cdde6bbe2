"""Runs of setups: the batch of scripts that accumulate gradients, and the first run."""

from dataclasses import replace

import pytest

from paceline.analyze.scaling.study_events import StudyListener
from paceline.analyze.scaling.study_folder import read_study, write_run
from paceline.analyze.scaling.study_model import (
    KNOB,
    STRONG,
    TEMPLATE,
    WEAK,
    BatchSource,
    RunFigures,
    Setup,
    Spread,
    StateSeconds,
    StudyRequest,
)
from paceline.study.scale import run_setup, run_study
from paceline.study.scale.plan import plan_points
from paceline.study.script_runs.run_process import Deadline
from paceline.study.study_folder import FIRST, new_run_folder
from paceline.study.trials import Trial

SCRIPT_BATCH = 32  # of a rank, if nothing sets it


class Accumulating:
    """Trials of a script that trains so many batches a step."""

    covered = ()

    def __init__(self, folder, batches=4):
        self.folder, self.batches, self.set, self.folders = folder, batches, [], []
        self.layouts, self.recorded = [], None  # a script that has a layout of its own
        self.deadline = Deadline.after(600)
        folder.mkdir(exist_ok=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for path in self.folder.iterdir():
            path.rmdir()

    def run_trials(self, specs):
        return [Trial(spec, 0, 0.2, float(len(self.set) + i)) for i, spec in enumerate(specs)]

    def figures(self, trial):
        spec = trial.spec
        given = spec.settings.get("global-batch")
        if spec.args:
            given = int(spec.args[0]) * spec.ranks
        self.set.append(given)
        self.folders.append(spec.record.parent)
        samples = self.batches * (given or SCRIPT_BATCH * spec.ranks)
        step = [0.01] * 20, samples, samples, StateSeconds(useful=0.01), {}, Spread()
        layout = spec.settings.get("layout", "")
        self.layouts.append(layout)
        layout = layout if self.recorded is None else self.recorded
        return RunFigures(2, 1, True, *step, batches_per_step=self.batches, layout=layout)


@pytest.fixture
def trials(tmp_path, monkeypatch):
    found = Accumulating(tmp_path / "temporary")
    monkeypatch.setattr(run_study, "Trials", lambda *_: found)
    monkeypatch.setattr(Trial, "load", lambda trial: trial)
    monkeypatch.setattr(Trial, "stopped", lambda *_: "")
    monkeypatch.setattr(run_setup, "figures_of_run", found.figures)
    monkeypatch.setattr(run_setup, "recorded_batch", lambda _: ("loader", ""))
    monkeypatch.setattr(run_setup, "measured_energy", lambda *_: ([], []))
    return found


def study(tmp_path, args=(), **more):
    request = StudyRequest("train.py", list(args), str(tmp_path), [STRONG, WEAK], [1, 2], **more)
    request = replace(request, oversubscribe=True)
    run_study.new_study(tmp_path / "study", request)
    return run_study.run_study(tmp_path / "study", StudyListener()).study


def test_folder_of_the_first_run_is_seen_by_all_hosts_and_removed(tmp_path, trials):
    study(tmp_path)
    first, *others = trials.folders
    assert first.parent == tmp_path / "study/runs"
    assert not first.exists()
    assert all(path.exists() for path in others)
    killed, _ = new_run_folder(tmp_path / "study", Setup(1, 1), FIRST)
    run_study.run_study(tmp_path / "study", StudyListener())
    assert not killed.exists()


@pytest.mark.parametrize("base", [None, 64])
def test_each_batch_of_a_step_is_a_part_of_the_global_batch(tmp_path, trials, base):
    found = study(tmp_path, global_batch=base)
    size = base or 4 * SCRIPT_BATCH
    assert trials.set[0] == base  # the first run shows how many batches a step has
    assert trials.set[1:4] == [size // 4, size // 4, size // 2]
    assert [(p.setup, p.failure, len(p.runs)) for p in found.points] == [
        (Setup(1, size), "", 3),
        (Setup(2, size), "", 3),
        (Setup(1, size), "", 3),
        (Setup(2, 2 * size), "", 3),
    ]
    assert found.batch.how == KNOB
    assert found.batch.text.endswith(f"{size} samples a step at the smallest size, in 4 batches")


def test_arguments_get_the_part_unless_the_script_divides(tmp_path, trials):
    found = study(tmp_path, args=["{per_rank}"], global_batch=64)
    assert trials.set[:2] == [64, 16]
    assert found.batch.how == TEMPLATE
    assert not [point.failure for point in found.points if point.failure]


def test_continued_study_divides_as_before(tmp_path, trials):
    found = study(tmp_path, precision=1.0)
    path = tmp_path / "study" / found.runs[-1].folder
    (path / "figures.json").unlink()
    trials.set.clear()
    run_study.run_study(tmp_path / "study", StudyListener())
    assert trials.set == [found.runs[-1].setup.global_batch // 4]
    assert not [point.failure for point in read_study(tmp_path / "study").points if point.failure]


def test_parts_that_sizes_do_not_divide_are_refused(tmp_path, trials):
    hint = r"batch of 68, in 4 batches a step, can't be divided by 2 ranks. HINT: --global-batch 72"
    with pytest.raises(ValueError, match=hint):
        study(tmp_path, global_batch=68)


def test_study_whose_runs_all_failed_is_continued_without_a_run(tmp_path, trials):
    trials.batches = 1
    found = study(tmp_path)
    for run in found.runs:
        failed = replace(run, figures=None, failure="RuntimeError: no memory")
        write_run(tmp_path / "study", failed)
    trials.set.clear()
    again = run_study.run_study(tmp_path / "study", StudyListener()).study
    assert not trials.set
    assert {point.failure for point in again.points} == {"RuntimeError: no memory"}


def test_layout_is_set_at_every_size_and_is_in_the_study(tmp_path, trials):
    found = study(tmp_path, layout="zero3")
    assert set(trials.layouts) == {"dp1 x zero3", "dp2 x zero3"}
    assert [(one.ranks, one.layout) for one in found.points if one.kind == STRONG] == [
        (1, "dp1 x zero3"),
        (2, "dp2 x zero3"),
    ]
    assert not any(one.failure for one in found.points)


@pytest.mark.parametrize(
    ("recorded", "said"),
    [("data", "trains in 'data' instead of the layout 'dp1 x zero3'"), ("", "without world.dist")],
)
def test_script_that_does_not_use_the_layout_fails(tmp_path, trials, recorded, said):
    trials.recorded = recorded
    with pytest.raises(ValueError, match=f"the study can't begin: the script {said}|{said}"):
        study(tmp_path, layout="zero3")


def test_layout_of_the_script_is_in_the_study(tmp_path, trials):
    trials.recorded = "zero1 + recompute"
    found = study(tmp_path)
    assert [one.layout for one in found.points if one.kind == STRONG] == [
        "dp1 x zero1 + recompute",
        "dp2 x zero1 + recompute",
    ]


def test_batch_of_a_layout_is_divided_over_its_data_ranks():
    request = StudyRequest("train.py", [], ".", [STRONG, WEAK], [2, 4, 8], layout="tp2")
    points = plan_points(request, BatchSource.of(KNOB, 64))
    assert [(p.kind, p.setup.layout, p.setup.global_batch, p.setup.rank_batch) for p in points] == [
        (STRONG, "dp1 x tp2", 64, 64),
        (STRONG, "dp2 x tp2", 64, 32),
        (STRONG, "dp4 x tp2", 64, 16),
        (WEAK, "dp1 x tp2", 64, 64),
        (WEAK, "dp2 x tp2", 128, 64),
        (WEAK, "dp4 x tp2", 256, 64),
    ]
    with pytest.raises(ValueError, match=r"batch of 6 can't be divided by 4 data ranks. HINT"):
        plan_points(request, BatchSource.of(KNOB, 6))


def test_sizes_that_do_not_fit_the_layout_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--layout and -n do not fit: .*needs a multiple of 2 ra"):
        study(tmp_path, layout="tp2")
