"""The command ``paceline verify`` with real ranks."""

import json
import subprocess

import pytest
import ranks

from paceline.analyze.reference.reference_file import read_reference

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
for epoch in range(3):
    #SET
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
"""


def run(folder, text, *words):
    script = ranks.write(folder, text.lstrip("\n"), "train.py")
    command = [ranks.PACELINE, "verify", "-n", "2", "--threads", "1", *map(str, words), "train.py"]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=script.parent, env=ranks.environment()
    )


def test_mistake_is_named_with_its_line(tmp_path):
    page = tmp_path / "page.html"
    done = run(tmp_path, SCRIPT, "--json", "--html", page)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (found["format"], found["ranks"], found["differences"]) == (
        "paceline-verification",
        2,
        1,
    )
    assert found["findings"][0]["mistake"] == "epoch-not-set"
    assert found["findings"][0]["lines"][0] == "train.py:15"
    assert found["compared"]["related"] == found["compared"]["steps"] >= 12
    assert found["compared"]["replayed"] > 0
    assert "All epochs have the same order" in page.read_text()


@pytest.mark.long
def test_right_training_has_exit_code_0(tmp_path):
    done = run(tmp_path, SCRIPT.replace("#SET", "sampler.set_epoch(epoch)"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks train what one process does, as far as it was compared." in done.stdout


@pytest.mark.long
def test_random_numbers_and_losses_of_each_rank_are_confirmed(tmp_path):
    """Dropout and noise with numbers of each rank, and a loss that compares a rank's samples."""
    text = SCRIPT.replace("#SET", "sampler.set_epoch(epoch)")
    text = text.replace("nn.Tanh(),", "nn.Tanh(), nn.Dropout(0.3),")
    text = text.replace("for epoch in", "torch.manual_seed(1 + dist.get_rank())\nfor epoch in")
    drawn = "torch.from_numpy(noise.normal(0, 0.1, tuple(x.shape)).astype('f'))"
    text = text.replace("model(x)", f"model(x + {drawn})")
    text = text.replace("dist.init", "import numpy\nnoise = numpy.random.default_rng()\ndist.init")
    done = run(tmp_path, text)
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "but for: random numbers of each rank in the model or the loop (confirmed)" in said
    text = SCRIPT.replace("#SET", "sampler.set_epoch(epoch)")
    text = text.replace("model(x), y)", "(model(x) - model(x).mean(0)), y)")
    done = run(tmp_path, text)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "--accept part-loss" in done.stdout
    (tmp_path / "s.toml").write_text(
        'format = "paceline-settings"\nversion = 1\n[verify]\naccept = ["part-loss"]\n'
    )
    done = run(tmp_path, text, "--settings", "s.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "but for: a loss that is computed over the part of a rank (confirmed)" in said


@pytest.mark.long
def test_script_that_fails_has_exit_code_2(tmp_path):
    done = run(tmp_path, "raise RuntimeError('no data here')")
    assert done.returncode == 2
    assert "RuntimeError: no data here" in done.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--seeds 2", "--seeds is for --make-reference"),
        ("--metric loss", "--metric is for --make-reference"),
        ("-n 2 --make-reference r.json", "-n 2: a reference is trained on one rank"),
        ("--make-reference r.json --json", "--make-reference compares nothing"),
        ("--make-reference absent/r.json", "absent is not a folder"),
        ("--accept batch_norm", "'batch_norm': there is no difference of this name"),
        ("--settings settings.toml", "'lucky': there is no difference of this name"),
    ],
)
def test_options_that_do_not_fit_together(tmp_path, options, told):
    script = ranks.write(tmp_path, "print('started')")
    head = 'format = "paceline-settings"\nversion = 1\n'
    (tmp_path / "settings.toml").write_text(f'{head}[verify]\naccept = ["part-loss", "lucky"]\n')
    words = [ranks.PACELINE, "verify", *options.split(), script]
    done = ranks.run_command(words, tmp_path, ranks.environment())
    assert done.returncode == 2
    assert told in done.stderr
    assert "HINT" in done.stderr


@pytest.mark.long
def test_reference_of_verify_is_one_of_run(tmp_path):
    """A folder gets the file, and paceline run --reference takes the folder."""
    script = ranks.write(
        tmp_path,
        """
        import sys, torch
        torch.manual_seed(int(sys.argv[1]))
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(60):
            optimizer.zero_grad()
            x = torch.randn(8, 4)
            torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
        """,
    )
    folder = tmp_path / "reference"
    folder.mkdir()
    words = [ranks.PACELINE, "verify", "--make-reference", folder, "--seeds", "2", script, "{seed}"]
    done = ranks.run_command(words, tmp_path, ranks.environment())
    assert done.returncode == 0, done.stderr
    assert len(read_reference(folder).runs) == 2
    result = ranks.run(script, 3, ranks=1, launcher=f"paceline --reference {folder}")
    assert "stayed within the band of the reference" in result.stderr
