"""The command ``paceline verify`` with real ranks."""

import json
import subprocess

import pytest
import ranks

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
    assert (found["format"], found["ranks"], found["mistakes"]) == ("paceline-verification", 2, 1)
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
def test_script_that_fails_has_exit_code_2(tmp_path):
    done = run(tmp_path, "raise RuntimeError('no data here')")
    assert done.returncode == 2
    assert "RuntimeError: no data here" in done.stderr
