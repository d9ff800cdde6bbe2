"""Remedies on real ranks: applied, measured against the prediction, and kept if they help."""

import json
import math
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import ranks

from paceline.analyze.diagnosis.diagnosis import (
    FALSE_KEEP_LEVEL,
    Diagnosis,
    Remedy,
    Trial,
    TrialResults,
)
from paceline.analyze.diagnosis.rungs import Interval
from paceline.knobs.settings import settings_for_script
from paceline.study.diagnose import diagnose as diagnose_module
from paceline.study.diagnose import ladder
from paceline.study.diagnose import try_remedies as trials_module
from paceline.study.diagnose.diagnose import (
    PredictedGain,
    prediction_errors,
    predictions_file,
    run_diagnosis,
    save_kept_settings,
    store_predictions,
    try_all,
)
from paceline.study.diagnose.run_script import OutOfTimeError, RunRequest
from paceline.study.diagnose.try_remedies import (
    confirm_kept,
    try_remedies,
)
from paceline.study.script_runs.run_process import Deadline

# A loader needs 20 ms per batch, and one parameter is unused.
TRAIN = """
    import sys, time, torch, torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, Dataset
    from torch.utils.data.distributed import DistributedSampler

    class Slow(Dataset):
        def __len__(self):
            return 3200
        def __getitem__(self, i):
            time.sleep(0.005)
            return torch.ones(64), torch.tensor(0.5)

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(64, 1), nn.Linear(64, 1)
        def forward(self, x):
            return self.used(x)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Half(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    data = Slow()
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.004)
    """


@pytest.fixture
def asked(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(ladder, "REPETITIONS", (2, 2))
    monkeypatch.setattr(trials_module, "LOOKS", (3,))
    monkeypatch.setattr(trials_module, "MICRO_ROUNDS", 1)
    monkeypatch.chdir(tmp_path)
    script = ranks.write(tmp_path, TRAIN)
    return RunRequest(str(script), [], [], ["--threads", "1"], 2, steps=16, warm=4)


@pytest.mark.long
@pytest.mark.alone
def test_effective_remedy_is_kept_and_breaking_remedy_rejected(asked):
    """Run what --try runs, without the ladder before and after."""
    foreseen = Interval(1.0, 0.97, 1.03)
    workers = Remedy("loader-workers", "input-waiting", 3, foreseen, "a formula", True, "")
    unused = Remedy("unused-search-off", "", True, foreseen, "", True, "")
    nothing = Remedy("bucket-mb", "", None, None, "", True, "")
    found, said = TrialResults(), []
    try_remedies(asked, asked.steps, [unused, workers, nothing], found, said.append)
    each = {one.remedy.knob: one for one in found.trials}
    assert each["loader-workers"].kept
    assert each["loader-workers"].gain.low > 0.5
    assert each["loader-workers"].predicted == foreseen
    assert found.kept == {"loader-workers": 3}
    assert found.faster == 1 + each["loader-workers"].gain.mean
    broken = each["unused-search-off"]
    assert (broken.kept, broken.gain) == (False, None)
    assert (
        "the script fails with it: RuntimeError: Expected to have finished reduction" in broken.why
    )
    assert each["bucket-mb"].why.endswith("no cause suggests a value. HINT: --try bucket-mb=VALUE")
    # 16 steps, rounded up to whole bursts of three workers and of two
    assert any("with loader-workers, 18 steps" in line for line in said)


@pytest.mark.long
@pytest.mark.alone
def test_slow_script_is_improved_and_settings_are_saved(asked, tmp_path):
    found = run_diagnosis(asked, lambda _: None)
    first = found.remedies[0]
    assert (first.knob, first.cause, first.settable) == ("loader-workers", "input-waiting", True)
    assert first.gain.mean > 0.5
    result = try_all(asked, found, ["loader-workers", "compress-fp16"], lambda _: None)
    each = {one.remedy.knob: one for one in result.tried.trials}
    workers = each["loader-workers"]
    if first.gain.high - first.gain.low > 0.2:  # a short measurement was made before it as well
        assert (workers.first, workers.source) == (first.gain, "a formula and a few steps")
    else:
        assert (workers.predicted, workers.source) == (first.gain, "a formula")
    assert result.tried.kept["loader-workers"] == first.value
    # All that was kept is measured once more, and this is the gain that is reported.
    assert result.tried.confirmed.low > 0.3
    assert result.tried.faster == 1 + result.tried.confirmed.mean
    # The loss is compared because this remedy changes the numbers.
    rounded = each["compress-fp16"].loss
    assert rounded.with_it == pytest.approx(rounded.without, rel=0.01)
    # The script is diagnosed again with everything that was kept.
    rates = [one.waterfall.measured.mean for one in (result, result.after)]
    assert rates[1] > 1.5 * rates[0]
    # Predictions and measurements are stored, and what helped can be applied.
    lines = predictions_file().read_text().splitlines()
    assert [(told["knob"], told["source"]) for told in map(json.loads, lines)] == [
        (one.remedy.knob, source)
        for one in result.tried.trials
        for source, said in ((one.remedy.source, one.first), (one.source, one.predicted))
        if one.gain is not None and said is not None
    ]
    assert "fast.toml; apply them with paceline run --settings" in save_kept_settings(
        result, tmp_path / "fast.toml"
    )
    knobs, notes = settings_for_script(tmp_path / "fast.toml", "script.py")
    assert (knobs, notes) == (result.tried.kept, [])


def diagnose(folder, *words):
    script = ranks.write(folder, TRAIN)
    return subprocess.run(
        [ranks.PACELINE, "diagnose", "-n", "2", *words, script],
        capture_output=True,
        text=True,
        timeout=120,
        env=ranks.environment(),
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--try", "warp"],
            "--try NAME must be all or a knob; this is 'warp'. HINT: all, or one of",
        ),
        (
            ["--try", "float32"],
            "--try float32: this remedy needs an edit of the script. HINT: use float32",
        ),
        (
            ["--try", "bucket-mb=lots"],
            "--try bucket-mb=VALUE must be a number from 0.1 to 4096; this is 'lots'. HINT: --try",
        ),
        (
            ["--try", "bucket-mb=inf"],
            "--try bucket-mb=VALUE must be a number from 0.1 to 4096; this is 'inf'. HINT: --try",
        ),
        (["--save-settings", "x.toml"], "--save-settings needs --try. HINT: add --try all"),
        (
            ["--try", "compress-bf16", "--try", "compress-fp16"],
            "compress-bf16 and compress-fp16 exclude each other. HINT: remove one",
        ),
    ],
)
def test_invalid_remedies_are_reported_before_any_run(tmp_path, words, said):
    done = diagnose(tmp_path, *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"paceline: {said}")
    assert done.stdout == ""


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError("no loader any more")])
def test_results_before_interruption_are_preserved(asked, monkeypatch, stop):
    """The command is stopped in the diagnosis that follows the first trial."""
    ladder = SimpleNamespace(steps=16, run_s=0.0)
    found = Diagnosis(["script.py"], ladder, None, None, [], [], ["a note"], remedies=[])
    trial_of = Remedy("loader-workers", "", 3, None, "", True, "")

    def once(asked, steps, remedies, into, say, run_s):
        into.trials.append(Trial(trial_of, None, Interval(0.5, 0.4, 0.6), True))
        into.kept["loader-workers"] = 3

    def again(asked, say):
        raise stop

    monkeypatch.setattr(diagnose_module, "try_remedies", once)
    monkeypatch.setattr(diagnose_module, "run_diagnosis", again)
    result = try_all(asked, found, ["loader-workers=3"], lambda _: None)
    assert result.tried.kept == {"loader-workers": 3}
    assert result.after is None
    said = {
        True: "interrupted, and not all remedies were tried",
        False: "the script could not be diagnosed again: no loader",
    }
    assert result.notes[0] == "a note"
    assert said[stop is KeyboardInterrupt] in result.notes[1]


def test_remedies_without_time_are_tried_in_next_pass(asked, monkeypatch):
    def remedy(knob, gain):
        return Remedy(knob, "", True, Interval(gain, gain, gain), "a formula", True, "")

    workers, views, kept = (
        remedy("loader-workers", 0.9), remedy("gradient-views", 0.5), remedy("keep-memory", 0.1)
    )  # fmt: skip
    first = Diagnosis(["script.py"], SimpleNamespace(steps=16, run_s=0.0), None, None, [], [], [])
    seen = []

    def once(asked, steps, remedies, into, say, run_s):
        seen.append([one.knob for one in remedies])
        gain = Interval(0.5, 0.4, 0.6)
        into.trials += [Trial(remedies[0], gain, gain, True)]
        into.trials += [
            Trial(one, gain, None, False, "not tried", late=True) for one in remedies[1:]
        ]
        into.kept[remedies[0].knob] = True

    second = replace(first, remedies=[workers, views, kept, remedy("threads", -0.1)])
    monkeypatch.setattr(diagnose_module, "try_remedies", once)
    monkeypatch.setattr(diagnose_module, "run_diagnosis", lambda asked, say: second)
    monkeypatch.setattr(diagnose_module, "confirm_kept", lambda *_: "a remark")
    result = try_all(asked, replace(first, remedies=[workers, views]), ["all"], lambda _: None)
    assert result.notes == ["a remark"]
    late = ["gradient-views", "keep-memory", "threads"]
    assert seen == [["loader-workers", "gradient-views"], late, ["keep-memory"]]
    told = [(one.remedy.knob, one.kept, one.late) for one in result.tried.trials]
    assert told == [
        ("loader-workers", True, False),
        ("gradient-views", True, False),
        ("threads", False, True),
        ("keep-memory", True, False),
    ]


KNOBS_IN_TURN = [
    *("loader-workers", "gradient-views", "keep-memory", "threads", "bucket-mb", "compress-bf16"),
    *(
        "persistent-workers",
        "unused-search-off",
        "static-graph",
        "channels-last",
        "own-binding-off",
    ),
]


class Simulated:
    """A script whose runs differ by chance, and that some settings make faster.

    Runs differ by 2 % with heavy tails, and by what slowly drifts from run to run.
    """

    def __init__(self, monkeypatch, seed, gains=()):
        self.rng, self.gains, self.drift = np.random.default_rng(seed), dict(gains), 0.0
        self.pairs = 0
        runner = SimpleNamespace(deadline=Deadline.after(1e6))
        monkeypatch.setattr(trials_module, "Runner", lambda asked, say: nullcontext(runner))
        monkeypatch.setattr(trials_module, "run_pair", lambda *given: self.pair(*given))

    def pair(self, runner, base, added, steps, at, name):
        logs = {}
        self.pairs += 1
        for on in (False, True) if at % 2 == 0 else (True, False):
            self.drift += self.rng.normal(0, 0.002)
            chance = 0.012 * self.rng.standard_t(3) + self.drift
            logs[on] = chance + sum(self.gains.get(knob, 0.0) for knob in added) * on
        return trials_module.Pair(logs[True] - logs[False])

    def tried(self, knobs=KNOBS_IN_TURN):
        asked, found = RunRequest("script.py", [], [], [], 2), TrialResults()
        remedies = [Remedy(k, "cause", 2, Interval(0.1, 0.08, 0.12), "", True, "") for k in knobs]
        try_remedies(asked, 20, remedies, found, str)
        remark = confirm_kept(asked, 20, found, str)
        return found, remark


def test_nothing_is_kept_if_no_remedy_has_an_effect(monkeypatch):
    """At most in the stated share of runs a trial keeps one, and hardly ever a gain is claimed."""
    script = Simulated(monkeypatch, seed=3)
    results = [script.tried()[0] for _ in range(250)]
    wrong = [one for one in results if one.confirmed is not None]
    assert len(wrong) / len(results) <= FALSE_KEEP_LEVEL
    claimed = [one for one in results if one.kept]
    assert len(claimed) <= 2
    assert all(one.faster == 1.0 for one in results if not one.kept)


def test_reported_gain_is_that_of_all_kept_remedies_measured_again(monkeypatch):
    """A gain near the noise is kept where it was measured too large; it is reported as it is."""
    true = {"loader-workers": 0.03, "keep-memory": 0.02}
    script = Simulated(monkeypatch, seed=4, gains=true)
    results = [script.tried(list(true))[0] for _ in range(250)]
    kept = [one for one in results if one.confirmed is not None]
    assert len(kept) > 50
    product = [
        math.prod(1 + trial.gain.mean for trial in one.trials if trial.gain.low > 0) - 1
        for one in kept
    ]
    real = [
        math.expm1(sum(true[trial.remedy.knob] for trial in one.trials if trial.gain.low > 0))
        for one in kept
    ]
    confirmed = [one.confirmed.mean for one in kept]
    assert np.mean(product) - np.mean(real) > 0.004  # the winner's curse
    assert abs(np.mean(confirmed) - np.mean(real)) < 0.002
    inside = [
        one.confirmed.low <= x <= one.confirmed.high for one, x in zip(kept, real, strict=True)
    ]
    assert np.mean(inside) >= 0.9


def test_pairs_before_the_first_look_decide_nothing(monkeypatch):
    script = Simulated(monkeypatch, seed=7, gains={"loader-workers": 0.5})
    pair = script.pair

    def until_late(*given):
        if script.pairs == 2:
            raise OutOfTimeError(1.0, None)
        return pair(*given)

    script.pair = until_late
    found, _ = script.tried(["loader-workers"])
    (trial,) = found.trials
    assert (trial.late, trial.gain, trial.kept) == (True, None, False)


def test_large_gains_are_kept_in_few_rounds(monkeypatch):
    script = Simulated(monkeypatch, seed=5, gains={"loader-workers": 0.3, "threads": 0.15})
    for _ in range(20):
        found, remark = script.tried()
        assert {"loader-workers", "threads"} <= set(found.kept)
        assert remark == ""
        each = {trial.remedy.knob: trial for trial in found.trials}
        assert each["loader-workers"].rounds <= 5
        assert found.faster == pytest.approx(math.exp(0.45), rel=0.06)


def test_unconfirmed_gain_is_not_kept(monkeypatch):
    Simulated(monkeypatch, seed=6)
    asked = RunRequest("script.py", [], [], [], 2)
    trial = Trial(
        Remedy("keep-memory", "", True, None, "", True, ""), None, Interval(0.1, 0.01, 0.2), True
    )
    found = TrialResults([trial], {"keep-memory": True}, 1.1)
    remark = confirm_kept(asked, 20, found, str)
    assert "nothing is kept: measured again together" in remark
    assert (found.kept, found.faster) == ({}, 1.0)
    assert found.trials[0].kept is False
    assert found.confirmed.low <= 0


def test_prediction_errors_are_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert prediction_errors() == {}
    pairs = [
        PredictedGain("2026-11-22", "train.py", "threads", source, 0.2, 0.1, 0.3, measured)
        for source, measured in (
            ("the ladder", 0.21), ("the ladder", 0.25), ("the ladder", 0.17), ("a formula", 0.3),
        )
    ]  # fmt: skip
    assert store_predictions(pairs) == ""
    with predictions_file().open("a") as file:
        file.write('{"cut sho')
    found = prediction_errors()
    assert found.keys() == {"the ladder"}
    assert (found["the ladder"].points, found["the ladder"].count) == (pytest.approx(3.0), 3)
    predictions_file().unlink()
    predictions_file().mkdir()
    assert "these predictions are not remembered" in store_predictions(pairs)
