"""``paceline export``: from checkpoints of any layout to a model file."""

import json

import pytest
import torch
from typer.testing import CliRunner

from paceline.checkpoint.saver import CheckpointSaver
from paceline.checkpoint.shared_state import SharedState
from paceline.cli import app
from paceline.deploy.native_model import NativeModel

SCRIPT = """
import torch
from torch import nn
import helper_of_net

def build(width=5):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))

def with_example():
    return nn.Conv1d(2, 3, 3), torch.randn(4, 2, 9)

def nothing():
    return 3

class Conditional(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

def conditional():
    return Conditional(), torch.randn(4, 2)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.deploy.export.MEASURE_S", 0.002)
    (tmp_path / "helper_of_net.py").write_text("")
    path = tmp_path / "exported_net.py"
    path.write_text(SCRIPT)
    return path


def export(*words):
    backend = () if "--backend" in words else ("--backend", "builtin")
    return CliRunner().invoke(app, ["export", *map(str, words), *backend])


def test_newest_checkpoint_is_exported_with_its_weights(tmp_path, script):
    weights = {
        "0.weight": torch.randn(5, 3), "0.bias": torch.randn(5), "2.weight": torch.randn(2, 5),
        "2.bias": torch.randn(2),
    }  # fmt: skip
    saver = CheckpointSaver(tmp_path / "ckpt", 0, 1, None, pytest.fail)
    saver.save(7, SharedState({"models": [weights]}), {}, {})
    saver.wait()
    out = tmp_path / "model.paceline"
    words = ["--model", f"{script}:build(5)", "--out", out, "--json"]
    result = export(tmp_path / "ckpt", *words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["format"], found["backend"]) == ("paceline-export", "builtin")
    assert found["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["batch", 3]}]
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    model.load_state_dict(weights)
    x, y = torch.randn(4, 3), torch.empty(4, 2)
    with NativeModel(out) as native:
        native.run([x], [y])
        assert json.loads(native.describe())["step"] == 7
    assert torch.allclose(y, model(x), rtol=1e-5, atol=1e-6)
    assert "exists" in export(tmp_path / "ckpt", *words).output


def test_example_inputs_units_and_table(tmp_path, script):
    fields = tmp_path / "fields.json"
    fields.write_text('{"x": {"unit": "K", "mean": [1.0, 2.0], "std": 2.0}, "y": {"unit": "Pa"}}')
    out = tmp_path / "model.paceline"
    result = export("--model", f"{script}:with_example", "--fields", fields, "--out", out)
    assert result.exit_code == 0, result.output
    assert "x: float32[batch,2,9] in K" in result.stdout
    assert "y: float32[batch,3,7] in Pa" in result.stdout
    assert "eager PyTorch" in result.stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--model", "{script}:absent"], "can't be imported"),
        (["--model", "{script}:nothing"], "returned int"),
        (["--model", "{script}:build(x)"], "must be numbers"),
        (["--model", "{script}:build(1, 2, 3)"], "arguments"),
        (["--model", "{script}:conditional"], "torch.export can't export"),
        (["absent", "--model", "{script}:build"], "absent does not exist"),
        ([], "--model is missing"),
        (["--model", "{script}:build", "--input", "x float32"], "HINT: --input 'x: float64"),
        (["--model", "{script}:build", "--input", "x: int32[batch,3]"], "float32 or float64"),
        (["--model", "{script}:build", "--input", "x: float32[batch,4]"], "[5, 4]"),
        (["--model", "{script}:build", "--bound", "n=1:4"], "no size of an input"),
        (["--model", "{script}:build", "--bound", "batch=9:4"], "not NAME=MIN:MAX"),
        (["--model", "{script}:build", "--backend", "torchscript"], "unknown backend"),
        (["--model", "{script}:build", "--fields", "absent.json"], "absent.json"),
        (["--model", "{script}:build", "--prefix", "a."], "checkpoint"),
        (["--show-build-flags", "rust"], "unknown language"),
    ],
)
def test_mistakes_are_one_message(tmp_path, script, words, reason):
    out = tmp_path / "model.paceline"
    given = [word.format(script=script) for word in words]
    result = export(*given, "--out", out)
    assert result.exit_code == 2, result.output
    assert reason in result.output
    assert "Traceback" not in result.output
    assert not out.exists()


def test_weights_that_do_not_fit_are_named(tmp_path, script):
    torch.save({"0.weight": torch.zeros(4, 3)}, tmp_path / "weights.pt")
    out = tmp_path / "model.paceline"
    result = export(tmp_path / "weights.pt", "--model", f"{script}:build", "--out", out)
    assert result.exit_code == 2
    assert "does not fit the module" in result.output
    assert "2.bias" in result.output
