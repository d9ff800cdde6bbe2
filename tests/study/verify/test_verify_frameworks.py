"""``paceline verify`` of trainings with Lightning and the Hugging Face Trainer."""

from pathlib import Path

import pytest

from paceline.analyze.verification.find import judge
from paceline.study.trials import ScriptRequest
from paceline.study.verify import run_verification

EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPTS = Path(__file__).parents[3] / "benchmarks" / "verify" / "open_half" / "scripts"


def verify(tmp_path, monkeypatch, name, edit=("", "")):
    script = tmp_path / "train.py"
    script.write_text((SCRIPTS / f"{name}.py").read_text().replace(*edit))
    monkeypatch.chdir(tmp_path)
    request = ScriptRequest(str(script), [], options=["--threads", "1"], ranks=2)
    runs = run_verification(request, lambda _: None)
    return runs, *judge(runs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("package", "name"), [("lightning", "tabular_lightning"), ("transformers", "masked_trainer")]
)
def test_training_of_a_framework_is_compared_with_one_process(tmp_path, monkeypatch, package, name):
    pytest.importorskip(package)
    runs, found, seen = verify(tmp_path, monkeypatch, name)
    assert [one.mistake.id for one in found if not one.is_question] == []
    (trained,) = [x for x in runs.ranks[0].loaders if x.passes[0].phase == "training"]
    assert [one.batches for one in trained.passes] == [6, 6, 6]  # shortened
    assert seen.evaluated == 3 * 64
    assert seen.replayed == seen.steps == 18
    assert all(difference < 1e-4 for difference, _ in seen.differences.values())
    assert not seen.notes


@pytest.mark.long
def test_an_example_with_a_loader_of_paceline_is_compared_with_one_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = ScriptRequest(str(EXAMPLES / "digits.py"), [], ranks=2)
    runs = run_verification(request, lambda _: None)
    found, seen = judge(runs)
    assert [one.mistake.id for one in found if not one.is_question] == []
    assert not runs.ranks[0].unseen
    assert runs.permuted is not None  # rounding is measured
    assert seen.replayed == seen.steps


@pytest.mark.long
def test_metric_that_lightning_does_not_combine_is_named(tmp_path, monkeypatch):
    pytest.importorskip("lightning")
    edit = ("self.val_mse, on_epoch", "nn.functional.mse_loss(self(x), y), on_epoch")
    _, found, _ = verify(tmp_path, monkeypatch, "tabular_lightning", edit)
    (one,) = [one for one in found if not one.is_question]
    assert one.mistake.id == "metric-of-one-rank"
    assert "without sync_dist" in one.text
