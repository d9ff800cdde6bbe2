"""The loop of a scaling study: what is run, how often, in which order; what a failure leaves."""

import contextlib
import os
from dataclasses import replace

import pytest

from paceline.analyze.scaling.study_events import StudyListener
from paceline.analyze.scaling.study_folder import read_study, write_run
from paceline.analyze.scaling.study_model import (
    KNOB,
    STRONG,
    WEAK,
    RunFigures,
    Setup,
    Spread,
    StateSeconds,
    StudyRequest,
    StudyRun,
)
from paceline.study.scale import run_study as module
from paceline.study.scale.plan import PER_RANK, filled_in
from paceline.study.scale.request import parse_precision, parse_sizes
from paceline.study.scale.run_setup import SetupResult
from paceline.study.scale.run_study import new_study, run_study
from paceline.study.study_folder import new_run_folder
from paceline.study.study_nodes import StudyNodes
from paceline.study.trials import InterruptedTrialError, Trial, TrialSpec

STEP_S = 0.01


class FakeRuns:
    """Stands for the runs of a script; a run takes no time.

    Attributes:
        noise: By setup, factors of the duration of a step, one for each run.
        failing: Sizes at which the script fails.
        interrupt_at: Number of the run that the user interrupts.
    """

    def __init__(self):
        self.noise, self.failing, self.interrupt_at = {}, set(), None
        self.order, self.groups, self.plans, self.batch = [], [], [], 64
        self.nodes = StudyNodes("this machine", (4,))

    def __call__(self, folder, request, place, trials):
        self.folder, self.trials = folder, trials
        return self

    def first_run(self, setup, plan):
        size = setup.global_batch if plan.sets_batch else self.batch
        return SetupResult(StudyRun("first", setup, 0, *self.figures(setup, size, 1.0)))

    def run(self, setups, plan):
        self.groups.append([setup.name for setup in setups])
        return [self.run_one(setup, plan) for setup in setups]

    def run_one(self, setup, plan):
        if len(self.order) == self.interrupt_at:
            raise InterruptedTrialError(Trial(TrialSpec(None, self.folder), None, 0.0, 0.0))
        path, repeat = new_run_folder(self.folder, setup)
        self.order.append(setup.name)
        self.plans.append(plan)
        factors = self.noise.get(setup.name, [1.0])
        found = self.figures(setup, setup.global_batch, factors[repeat % len(factors)])
        how = KNOB if found[0] is not None else ""
        name, started = f"runs/{path.name}", 1.0 + len(self.order)
        run = StudyRun(name, setup, repeat, *found, 1, 0.2, started, how)
        write_run(self.folder, run)
        return SetupResult(run)

    def figures(self, setup, samples, factor):
        if setup.ranks in self.failing:
            return None, "RuntimeError: no memory"
        step_s = STEP_S * factor
        seconds = StateSeconds(useful=step_s)
        steps, pop = [step_s] * 20, {"useful": 1.0}
        return RunFigures(2, 1, True, steps, samples, samples, seconds, pop, Spread()), ""


@pytest.fixture
def runs(monkeypatch):
    found = FakeRuns()
    monkeypatch.setattr(module, "SetupRunner", found)
    monkeypatch.setattr(module, "find_study_nodes", lambda where: found.nodes)

    class Nothing(contextlib.nullcontext):
        def __init__(self, asked, *_):
            super().__init__(self)
            from paceline.study.script_runs.run_process import Deadline

            self.deadline = Deadline.after(60 * asked.minutes)

    monkeypatch.setattr(module, "Trials", Nothing)
    return found


def study(tmp_path, sizes=(1, 2), **more):
    request = StudyRequest("train.py", [], os.getcwd(), [STRONG, WEAK], list(sizes), **more)
    new_study(tmp_path / "study", request)
    return tmp_path / "study"


def test_sizes_are_interleaved_and_share_the_reference(tmp_path, runs):
    folder = study(tmp_path)
    found = run_study(folder, StudyListener()).study
    once = ["n1-b64", "n2-b64", "n2-b128"]
    assert runs.order == [*once, *reversed(once), *once]
    assert found.batch.base == 64
    assert found.batch.how == KNOB
    assert [(p.kind, p.setup.name, len(p.runs)) for p in found.points] == [
        (STRONG, "n1-b64", 3),
        (STRONG, "n2-b64", 3),
        (WEAK, "n1-b64", 3),
        (WEAK, "n2-b128", 3),
    ]


def test_only_sizes_that_are_not_known_precisely_are_repeated(tmp_path, runs):
    runs.noise = {"n2-b64": [1.0, 1.2]}
    found = run_study(study(tmp_path), StudyListener()).study
    counts = {p.setup.name: len(p.runs) for p in found.points}
    assert counts == {"n1-b64": 3, "n2-b64": 12, "n2-b128": 3}
    assert any("too noisy for --precision 3%" in note for note in found.notes)


def test_sizes_run_side_by_side_on_different_hosts(tmp_path, runs):
    runs.nodes = StudyNodes("-H", (1, 1, 1), ("a", "b", "c"))
    folder = study(tmp_path, side_by_side=True)
    found = run_study(folder, StudyListener()).study
    first = [["n1-b64", "n2-b64"], ["n2-b128"]]
    backwards = [["n2-b128"], ["n2-b64", "n1-b64"]]
    assert runs.groups == [*first, *backwards, *first]
    assert any("at the same time on different hosts" in note for note in found.notes)
    assert runs.nodes.where(1, 2) == ["-H", "c:1"]


def test_failure_at_one_size_does_not_end_the_others(tmp_path, runs):
    runs.failing = {2}
    found = run_study(study(tmp_path, (1, 2, 4)), StudyListener()).study
    assert [p.failure for p in found.of_kind(WEAK)] == ["", "RuntimeError: no memory", ""]
    assert runs.order.count("n2-b64") == 1
    assert runs.order.count("n4-b256") == 3


def test_failure_of_one_of_several_runs_is_told(tmp_path, runs):
    run_one = runs.run_one

    def fails_later(setup, plan):
        runs.failing = {2} if len(runs.order) >= 3 else set()
        return run_one(setup, plan)

    runs.run_one = fails_later
    found = run_study(study(tmp_path), StudyListener()).study
    (point,) = [one for one in found.of_kind(WEAK) if one.ranks == 2]
    assert (len(point.runs), point.failed_runs, point.failure) == (1, 1, "")
    told = [note for note in found.notes if "failed" in note]
    assert any(
        note.startswith("1 of 2 runs on 2 ranks with a global batch of 128 failed (Runtime")
        for note in told
    )
    folder = tmp_path / "study"
    assert f"HINT: rm -r {folder}/runs/n2-b128-1, then paceline scale --con" in "".join(told)
    assert not any("--minutes N" in note for note in found.notes)  # it would repeat nothing


def test_study_to_a_target_trains_each_seed_until_it_ends(tmp_path, runs):
    runs.noise = {"n2-b64": [1.0, 1.5]}  # noise asks for no further runs
    folder = study(tmp_path, until="accuracy>=0.9", seeds=2, minutes=2.0)
    run_study(folder, StudyListener())
    assert sorted(runs.order) == sorted(2 * ["n1-b64", "n2-b64", "n2-b128"])
    assert {plan.steps for plan in runs.plans} == {0}
    # the first of six runs may take a third of the time, the last one all that is left
    assert 30 < runs.plans[0].limit_s <= 40
    assert runs.plans[-1].limit_s > 100


def test_interrupted_study_is_continued(tmp_path, runs):
    folder = study(tmp_path)
    runs.interrupt_at = 4
    early = run_study(folder, StudyListener())
    assert early.interrupted
    assert len(early.study.runs) == 4
    new_run_folder(folder, Setup(2, 64))  # of a run that was killed
    runs.interrupt_at, before = None, len(runs.order)
    late = run_study(folder, StudyListener())
    assert len(runs.order) - before == 5
    assert {len(p.runs) for p in late.study.points} == {3}
    assert not [
        path for path in (folder / "runs").iterdir() if not (path / "figures.json").exists()
    ]


def test_runs_that_do_not_fit_into_the_time_are_not_started(tmp_path, runs, monkeypatch):
    folder = study(tmp_path)
    expected = module._StudyRun._expected_s
    slow = lambda self, setup: 1e6 if setup.ranks == 2 else expected(self, setup)  # noqa: E731
    monkeypatch.setattr(module._StudyRun, "_expected_s", slow)
    found = run_study(folder, StudyListener()).study
    assert set(runs.order) == {"n1-b64"}
    assert [len(p.runs) for p in found.of_kind(STRONG)] == [3, 0]


def test_runs_become_shorter_if_steps_take_longer_than_at_first(tmp_path, runs):
    runs.noise = {name: [10.0] for name in ("n1-b64", "n2-b64", "n2-b128")}
    folder = study(tmp_path)
    run_study(folder, StudyListener(), minutes=1)
    first, *others = [plan.steps for plan in runs.plans]
    assert first == 501  # of steps that took a tenth
    assert max(others) < 80
    assert len(runs.order) == 9


def test_batch_that_sizes_do_not_divide_is_refused_with_the_nearest(tmp_path, runs):
    runs.batch = 100
    with pytest.raises(ValueError, match=r"batch of 100 .* by 3 ranks.*--global-batch 102.*96 or"):
        run_study(study(tmp_path, (1, 2, 3)), StudyListener())


def test_existing_folder_is_not_overwritten(tmp_path, runs):
    folder = study(tmp_path)
    with pytest.raises(ValueError, match=r"has a study already.*--continue"):
        study(tmp_path)
    (folder / "study.json").unlink()
    with pytest.raises(ValueError, match=r"not empty.*HINT"):
        study(tmp_path)
    with pytest.raises(ValueError, match=r"not the folder of a scaling study"):
        run_study(folder, StudyListener())


def test_sizes_beyond_the_machine_are_refused(tmp_path, runs):
    with pytest.raises(ValueError, match=r"-n 8: there is room for 4 ranks.*HINT: -n 2"):
        study(tmp_path, (2, 8))
    assert not (tmp_path / "study").exists()
    folder = study(tmp_path, (2, 8), oversubscribe=True)
    run_study(folder, StudyListener())
    assert read_study(folder).of_kind(WEAK)[1].ranks == 8


@pytest.mark.parametrize(
    ("sizes", "options"), [([1, 2], ["--cpus-per-rank", "1"]), ([1, 3], ["--threads", "1"])]
)
def test_ranks_have_equal_cores_or_share_them(sizes, options):
    request = StudyRequest("train.py", [], "/", [STRONG], sizes, oversubscribe=True)
    assert module._with_equal_cores(request, StudyNodes("here", (2,), cores=2)) == options


def test_templates_become_the_batch_of_each_size(tmp_path):
    args = ["--batch-size", PER_RANK, "--all={global}", "--on={ranks}", "--seed={seed}"]
    assert filled_in(args, Setup(4, 64), 2) == [
        "--batch-size",
        "16",
        "--all=64",
        "--on=4",
        "--seed=2",
    ]
    request = StudyRequest("train.py", args, "/", [STRONG], [1, 2])
    with pytest.raises(ValueError, match=r"HINT: --global-batch N"):
        new_study(tmp_path / "study", request)
    new_study(tmp_path / "study", replace(request, global_batch=64))
    assert [p.setup.name for p in read_study(tmp_path / "study").points] == ["n1-b64", "n2-b64"]


@pytest.mark.parametrize(("text", "share"), [("3%", 0.03), ("0.05", 0.05), ("2.5 %", 0.025)])
def test_precision_is_a_share(text, share):
    assert parse_precision(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "0%", "200%", "x", "-1%"])
def test_other_precisions_are_refused(text):
    with pytest.raises(ValueError, match="HINT"):
        parse_precision(text)


def test_sizes_are_sorted_and_checked():
    assert parse_sizes("4,1, 2") == [1, 2, 4]
    with pytest.raises(ValueError, match=r"-n '2,1,2': a size is given more than .*HINT: -n 1,2$"):
        parse_sizes("2,1,2")
    for text in (None, "", "1,,2", "0,1", "1-4", "99999999"):
        with pytest.raises(ValueError, match="HINT"):
            parse_sizes(text)


def test_every_size_fills_the_first_hosts():
    nodes = StudyNodes("-H", (2, 2, 2), ("a", "b", "c"), ("--launcher", "srun"), cores=4)
    assert nodes.where(1) == ["-H", "a:1", "--launcher", "srun"]
    assert nodes.where(3)[:2] == ["-H", "a:2,b:1"]
    assert [nodes.hosts_of(n) for n in (1, 2, 3, 6)] == [1, 1, 2, 3]
    assert nodes.cores_of_rank(2) == 2
    assert nodes.capacity == 6
