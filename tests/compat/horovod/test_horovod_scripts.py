"""Scripts in the shape of Horovod's public examples run unchanged, and equal one process."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import ranks
import torch

SCRIPTS = Path(__file__).parent / "scripts"
# Options of the script on N ranks with the batches and the learning rate of one process.
SPLIT = {
    "mnist.py": lambda n: ["--batch-size", 32 // n, "--lr", 0.08 / n],
    "resnet.py": lambda n: ["--batch-size", 8 // n, "--base-lr", 0.05 / n, "--warmup-epochs", 0],
    "elastic.py": lambda n: ["--batch-size", 32 // n, "--lr", 0.08 / n],
    "embeddings.py": lambda n: ["--batch-size", 32 // n, "--lr", 2 / n],
}


def train(folder, script, count, *more, launcher="paceline"):
    """Run a script on ``count`` ranks; return what it printed, and the weights that it saved."""
    shutil.copy(SCRIPTS / script, folder)
    save = ["--folder", "."] if script == "resnet.py" else ["--save", "model.pt"]
    words = [*SPLIT[script](count), *save, *more]
    done = ranks.run(folder / script, *words, ranks=count, launcher=launcher)
    file = folder / ("checkpoint-2.pt" if script == "resnet.py" else "model.pt")
    weights = torch.load(file)
    return done, weights.get("model", weights)


SLOW = ("elastic.py", "resnet.py")
_ALONE = {}


def alone(factory, script):
    """Return what ``train`` returns for one rank, computed once for each script."""
    if script not in _ALONE:
        _ALONE[script] = train(factory.mktemp("alone"), script, 1)
    return _ALONE[script]


def assert_equal(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "script",
    [pytest.param(s, marks=pytest.mark.long if s in SLOW else ()) for s in SPLIT],
)
def test_ranks_equal_one_process_and_are_recorded(tmp_path, tmp_path_factory, script, count):
    first, expected = alone(tmp_path_factory, script)
    launcher = f"paceline --record {tmp_path / 'record'} --json=figures.json"
    done, found = train(tmp_path, script, count, launcher=launcher)
    assert_equal(found, expected)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["confidence"] == 1, figures["doubts"]
    assert not figures["doubts"]
    assert figures["unmatched"] == 0
    assert figures["steps"] > 20
    assert figures["samples"] > 0
    assert all(one["transfer"] > 0 for one in figures["states"])
    steps = [line for line in first.stdout.splitlines() if "oss" in line]
    assert len(steps) == len([line for line in done.stdout.splitlines() if "oss" in line]) == 2


@pytest.mark.parametrize(
    ("script", "options", "tolerance"),
    [
        ("mnist.py", ["--workers", 1], 1e-5),
        ("mnist.py", ["--gradient-predivide-factor", 2], 1e-5),
        ("mnist.py", ["--fp16-allreduce"], 1e-3),
        ("embeddings.py", ["--sparse-as-dense"], 1e-5),
    ],
)
@pytest.mark.long
def test_options_of_the_examples(tmp_path, tmp_path_factory, script, options, tolerance):
    _, expected = alone(tmp_path_factory, script)
    _, found = train(tmp_path, script, 2, *options)
    assert_equal(found, expected, tolerance)


@pytest.mark.long
def test_adasum_trains(tmp_path):
    done, _ = train(tmp_path, "mnist.py", 2, "--use-adasum")
    losses = [float(one) for one in re.findall(r"Average loss: ([\d.]+)", done.stdout)]
    assert losses[1] < 0.95 * losses[0]


@pytest.mark.long
def test_training_resumes_from_the_checkpoint_of_rank_0(tmp_path, tmp_path_factory):
    _, expected = alone(tmp_path_factory, "resnet.py")
    shutil.copy(SCRIPTS / "resnet.py", tmp_path)
    words = SPLIT["resnet.py"](2)
    ranks.run(tmp_path / "resnet.py", *words, "--epochs", 1)
    assert not (tmp_path / "checkpoint-2.pt").exists()
    done = ranks.run(tmp_path / "resnet.py", *words)
    assert "epoch 1" not in done.stdout
    assert_equal(torch.load(tmp_path / "checkpoint-2.pt")["model"], expected)


@pytest.mark.long
def test_elastic_script_continues_after_a_killed_rank(tmp_path, tmp_path_factory):
    _, expected = alone(tmp_path_factory, "elastic.py")
    launcher = "paceline --max-restarts 1"
    done, found = train(tmp_path, "elastic.py", 2, "--kill-at", 9, launcher=launcher)
    assert "restart" in done.stderr
    assert_equal(found, expected)


@pytest.mark.long
def test_mpirun_starts_it_with_the_folder_of_the_shim(tmp_path, tmp_path_factory):
    """As a user of mpirun does: one line with PYTHONPATH."""
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun: make test-packages")
    _, expected = alone(tmp_path_factory, "mnist.py")
    shutil.copy(SCRIPTS / "mnist.py", tmp_path)
    shim = subprocess.check_output([ranks.PACELINE, "horovodrun", "--shim"], text=True).strip()
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", "-x", "PYTHONPATH"]
    words += [ranks.BIN / "python", "mnist.py", *SPLIT["mnist.py"](2), "--save", "model.pt"]
    done = subprocess.run(
        [str(word) for word in words],
        cwd=tmp_path,
        env=ranks.environment(PYTHONPATH=shim),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert_equal(torch.load(tmp_path / "model.pt"), expected)
