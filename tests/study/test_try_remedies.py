"""Remedies on real ranks: applied, measured against the prediction, and kept if they help."""

import json
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ranks

from paceline.analyze.diagnosis.ladder import Interval
from paceline.knobs.settings import settings_for_script
from paceline.predict import history
from paceline.predict.remedies import Remedy
from paceline.study.diagnose import diagnose as diagnose_module
from paceline.study.diagnose import ladder
from paceline.study.diagnose import try_remedies as trials_module
from paceline.study.diagnose.diagnose import Diagnosis, run_diagnosis, try_all
from paceline.study.diagnose.run_script import RunRequest
from paceline.study.diagnose.save_settings import save_kept_settings
from paceline.study.diagnose.try_remedies import Trial, TrialResults, try_remedies

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
    monkeypatch.setattr(trials_module, "ROUNDS", (3, 3))
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
    # The loss is compared because this remedy changes the numbers.
    rounded = each["compress-fp16"].loss
    assert rounded.with_it == pytest.approx(rounded.without, rel=0.01)
    # The script is diagnosed again with everything that was kept.
    rates = [one.waterfall.measured.mean for one in (result, result.after)]
    assert rates[1] > 1.5 * rates[0]
    # Predictions and measurements are stored, and what helped can be applied.
    lines = history.path().read_text().splitlines()
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
    ladder = SimpleNamespace(steps=16)
    found = Diagnosis(["script.py"], ladder, None, None, [], [], ["a note"], remedies=[])
    trial_of = Remedy("loader-workers", "", 3, None, "", True, "")

    def once(asked, steps, remedies, into, say):
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
    first = Diagnosis(["script.py"], SimpleNamespace(steps=16), None, None, [], [], [])
    seen = []

    def once(asked, steps, remedies, into, say):
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
    result = try_all(asked, replace(first, remedies=[workers, views]), ["all"], lambda _: None)
    late = ["gradient-views", "keep-memory", "threads"]
    assert seen == [["loader-workers", "gradient-views"], late, ["keep-memory"]]
    told = [(one.remedy.knob, one.kept, one.late) for one in result.tried.trials]
    assert told == [
        ("loader-workers", True, False),
        ("gradient-views", True, False),
        ("threads", False, True),
        ("keep-memory", True, False),
    ]
