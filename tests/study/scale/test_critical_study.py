"""The runs of a measurement of the critical batch: what is run, continued, refused."""

import json
import re
from dataclasses import replace

import pytest
import ranks

from paceline.analyze.scaling.critical.critical_model import (
    BranchRun,
    CriticalRequest,
    read_critical,
)
from paceline.analyze.scaling.study_model import RunFigures, Spread, StateSeconds
from paceline.knobs.learning_rate import NAME as RATE_KNOB
from paceline.knobs.learning_rate import UsedOptimizer
from paceline.knobs.loading import ACCUMULATE
from paceline.knobs.loading import BATCH as BATCH_KNOB
from paceline.knobs.settings import Setting, write_settings
from paceline.record.experiments.protected_run import STEP_LIMIT_VARIABLE, StepLimit
from paceline.study.scale import critical_study as module
from paceline.study.scale.critical_study import BranchOutcome, new_critical, run_critical
from paceline.study.trials import InterruptedTrialError, Trial, TrialSpec

SGD, ADAM = UsedOptimizer("SGD", False, True), UsedOptimizer("AdamW", True, True)


class FakeRunner:
    """Stands for the runs of a script of 32 samples a step.

    Attributes:
        branches: What was run.
        most: Samples of a part that fit into memory.
        interrupt_at: Number of the run that the user interrupts.
    """

    def __init__(self):
        self.branches, self.optimizers, self.first_step = [], (SGD,), 40
        self.most, self.interrupt_at, self.fails = 10_000, None, set()

    def __call__(self, folder, request, trials):
        self.trials = trials
        return self

    def run(self, branch):
        self.branches.append(branch)
        if len(self.branches) == self.interrupt_at:
            raise InterruptedTrialError(Trial(TrialSpec(None, None), None, 0.0, 0.0))
        batch, run = branch.batch or 32, BranchRun(branch.multiple, branch.seed, branch.parts)
        if batch / branch.parts > self.most:
            why = "RuntimeError: CUDA out of memory"
            return BranchOutcome(replace(run, failure=why), text=why)
        if branch.multiple in self.fails:
            return BranchOutcome(replace(run, failure="wrong"), text="wrong")
        samples = [float(batch * (i + 1)) for i in range(branch.steps)]
        run = replace(run, samples=samples, losses=[1.0] * branch.steps, took_s=0.1)
        figures = RunFigures(
            *(1, 0, True, [0.001] * branch.steps, float(batch), float(batch)),
            *(StateSeconds(), {}, Spread()),
        )
        return BranchOutcome(run, figures, self.first_step, self.optimizers)


@pytest.fixture
def runner(monkeypatch):
    fake = FakeRunner()
    monkeypatch.setattr(module, "BranchRunner", fake)
    return fake


def measure(folder, **options):
    fields = {"ranks": 2, "multiples": [1, 2, 4], "seeds": 2, "minutes": 5.0} | options
    if not (folder / "out").exists():
        new_critical(folder / "out", CriticalRequest("train.py", [], str(folder), **fields))
    said = []
    return run_critical(folder / "out", said.append, None), " ".join(said)


def test_all_multiples_of_a_seed_train_the_same_samples(tmp_path, runner):
    ended, said = measure(tmp_path, steps=64)
    first, *branches = runner.branches
    assert (first.batch, first.factor) == (None, 1.0)
    assert [(b.multiple, b.seed) for b in branches] == [(k, s) for s in (0, 1) for k in (1, 2, 4)]
    assert {b.batch * b.steps for b in branches} == {64 * 32}
    assert [b.factor for b in branches[:3]] == [1.0, 2.0, 4.0]
    assert "branches at step 40: batch 32, learning rate by rule linear (SGD)" in said
    assert "run 6 of 6: 4 times the batch, seed 1: loss 1" in said
    assert len(ended.stored.runs) == 6


def test_learning_rate_of_adam_grows_with_the_root(tmp_path, runner):
    runner.optimizers = (ADAM,)
    measure(tmp_path, steps=64)
    assert [b.factor for b in runner.branches[1:4]] == [1.0, pytest.approx(2**0.5), 2.0]


def test_optimizers_with_different_rules_need_the_users_word(tmp_path, runner):
    runner.optimizers = (SGD, ADAM)
    with pytest.raises(ValueError, match=r"SGD, AdamW.*HINT: --rule linear"):
        measure(tmp_path, steps=64)
    (tmp_path / "other").mkdir()
    ended, _ = measure(tmp_path / "other", steps=64, rule="sqrt")
    assert ended.stored.point.rule == "sqrt"


def test_interrupted_measurement_continues_with_what_is_missing(tmp_path, runner):
    runner.interrupt_at = 4
    ended, _ = measure(tmp_path, steps=64)
    assert ended.interrupted
    assert len(read_critical(tmp_path / "out").runs) == 2
    runner.branches.clear()
    runner.interrupt_at = None
    ended, _ = measure(tmp_path)
    assert [(b.multiple, b.seed) for b in runner.branches] == [(4, 0), (1, 1), (2, 1), (4, 1)]


def test_batch_that_does_not_fit_is_accumulated_in_parts(tmp_path, runner):
    runner.most = 48
    ended, said = measure(tmp_path, steps=64)
    assert {run.multiple: run.parts for run in ended.stored.runs} == {1: 1, 2: 2, 4: 4}
    assert "4 times the batch does not fit into memory: it is split into 2 batches" in said
    assert len(ended.stored.runs) == 6


def test_multiple_that_fails_is_left_out_of_later_seeds(tmp_path, runner):
    runner.fails = {4}
    ended, said = measure(tmp_path, steps=64)
    assert [(r.multiple, r.seed) for r in ended.stored.runs if r.failure] == [(4, 0)]
    assert "4 times the batch, seed 0: failed: wrong" in said


def test_script_that_does_not_resume_is_refused(tmp_path, runner):
    runner.first_step, runner.optimizers = 0, (replace(SGD, is_restored=False),)
    with pytest.raises(ValueError, match=r"does not resume.*HINT: train it until"):
        measure(tmp_path, steps=64)


def test_script_that_loads_an_optimizer_resumes_also_if_steps_count_from_0(tmp_path, runner):
    runner.first_step = 0
    assert measure(tmp_path, steps=64)[0].stored.point.step == 0


def test_too_short_a_time_is_refused_with_the_time_that_is_needed(tmp_path, runner, monkeypatch):
    monkeypatch.setattr(module, "MIN_TAIL_STEPS", 200_000)
    with pytest.raises(ValueError, match=r"6 runs of at least 3200000 steps.*HINT: --minutes"):
        measure(tmp_path)


def test_few_steps_and_folders_in_use_are_refused(tmp_path):
    request = CriticalRequest("train.py", [], str(tmp_path), 2, [1, 8], steps=20)
    with pytest.raises(ValueError, match=r"--steps 20: a run with 8 times.*HINT: --steps 64"):
        new_critical(tmp_path / "out", request)
    template = replace(request, steps=None, args=["--batch", "{per_rank}"])
    with pytest.raises(ValueError, match=r"HINT: --global-batch N"):
        new_critical(tmp_path / "out", template)
    new_critical(tmp_path / "out", replace(request, steps=None))
    with pytest.raises(ValueError, match=r"HINT: paceline scale --continue"):
        new_critical(tmp_path / "out", replace(request, steps=None))


TRAIN = """
    import sys
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    out, epochs = sys.argv[1], int(sys.argv[2])
    world = paceline.init(seed=1, progress=False)
    x = torch.randn(2048, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(torch.arange(2048.0), x, (x.sum(1) > 0).long())
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = world.distribute(model, optimizer)
    loader = world.shard(DataLoader(data, batch_size=4, shuffle=True))
    for epoch in world.epochs(epochs, checkpoint=out, every=8):
        for numbers, x, y in world.batches(loader):
            if epoch:
                print("SEEN", numbers.int().tolist(), flush=True)
            world.backward(F.cross_entropy(model(x), y))
            world.step(optimizer)
            if epochs == 2 and world._recorder.step == 264 + 7:
                raise SystemExit(3)
"""


@pytest.fixture
def trained(tmp_path):
    """A script with a checkpoint inside of its second epoch."""
    script = ranks.write(tmp_path, TRAIN)
    ranks.run(script, "ckpt", 2, check=False)
    assert (tmp_path / "ckpt").is_dir()
    return script


def seen(folder, script, batch, parts=1):
    settings = folder / "settings.toml"
    knobs = {BATCH_KNOB: batch // parts, RATE_KNOB: 2.0, ACCUMULATE: parts}
    write_settings(settings, {name: Setting(value) for name, value in knobs.items()}, {})
    limit = StepLimit(32 // batch, str(folder / "scratch"), branches=True)
    launcher = f"paceline --settings {settings} --record {folder / f'record-{batch}-{parts}'}"
    found = ranks.run(
        script, "ckpt", 9, launcher=launcher, **{STEP_LIMIT_VARIABLE: limit.to_json()}
    )
    lines = [line for line in ranks.untagged(found.stdout) if line.startswith("SEEN")]
    numbers = [json.loads(line[line.index("[") :]) for line in lines]
    return sorted(n for of in numbers for n in of)


def test_branches_with_other_batches_resume_with_the_same_samples_and_save_nothing(
    tmp_path, trained
):
    before = sorted(str(path) for path in (tmp_path / "ckpt").rglob("*"))
    base = seen(tmp_path, trained, 8)
    assert len(set(base)) == 32
    assert seen(tmp_path, trained, 32) == base
    assert seen(tmp_path, trained, 32, parts=4) == base  # in one step: it ends after the first
    assert sorted(str(path) for path in (tmp_path / "ckpt").rglob("*")) == before


@pytest.mark.long
def test_command_measures_prints_and_continues(tmp_path, trained):
    words = [
        ranks.PACELINE,
        "scale",
        "--critical-batch",
        "-n",
        2,
        "--multiples",
        "1,2",
        "-o",
        "out",
    ]
    words += ["--seeds", 2, "--steps", 32, "--html", "page.html", "script.py", "ckpt", 9]
    done = ranks.run_command(words, tmp_path, ranks.environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"branches at step \d+: batch 8, learning rate by rule linear", done.stderr)
    assert "Critical batch: " in done.stdout
    assert "Gradient noise scale" in done.stdout
    assert (tmp_path / "page.html").exists()
    shown = ranks.run_command(
        [ranks.PACELINE, "scale", "--show", "out", "--json"], tmp_path, ranks.environment()
    )
    tree = json.loads(shown.stdout)
    assert [one["runs"] for one in tree["multiples"]] == [2, 2]
    again = ranks.run_command(
        [ranks.PACELINE, "scale", "--continue", "out"], tmp_path, ranks.environment()
    )
    assert "Critical batch: " in again.stdout
