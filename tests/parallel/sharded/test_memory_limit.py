"""A model that no rank may hold trains within a limit, is killed, resumed and exported."""

import json

import pytest
import ranks
import torch
from control_groups import SCRIPT, memory_groups, parent_group
from safetensors.torch import load_file

MIB = 1 << 20
# Same as the ranks' script; the plain model that reads the weights in the end.
MODEL = """
import torch
from torch import nn
import torch.nn.functional as F

WIDTH = 512

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.narrow = nn.Linear(WIDTH, WIDTH)
    def forward(self, x):
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))

class Model(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(WIDTH, 3)
        for layer in self.layers:
            nn.init.normal_(layer.narrow.weight, std=0.1 / blocks)
    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)

def data():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(80, 8, generator=g)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
"""
TRAINING = """
import sys, time
from torch.utils.data import DataLoader, TensorDataset
import paceline

def warm_up():  # PyTorch imports much late, which is no memory of the model
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import checkpoint
    tiny = nn.Linear(8, 8)
    if world.size > 1:
        fully_shard(tiny).set_force_sum_reduction_for_comms(True)
    checkpoint(tiny, torch.ones(8, 8), use_reentrant=False).sum().backward()
    torch.optim.Adam(tiny.parameters()).step()

layout, blocks, allowed_mib, die_at, out = sys.argv[1:]
world = paceline.init(seed=3, progress=False)
warm_up()
if allowed_mib != "0":
    limit_memory(int(allowed_mib) << 20)
with world.deferred():
    model = Model(int(blocks))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, eps=1e-4)
model, optimizer = world.distribute(model, optimizer, layout=layout, recompute="blocks")
loader = world.shard(DataLoader(TensorDataset(*data()), shuffle=True), global_batch=20)
for epoch in world.epochs(2, checkpoint="ckpt", every=2):
    for x, y in world.batches(loader):
        if world.rank == 1 and world._recorder.step == int(die_at):
            while not Path("ckpt/step-00000002/manifest.json").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        loss = F.cross_entropy(model(x), y)
        world.backward(loss)
        step = world._recorder.step
        world.step(optimizer)
        mean = world.mean(loss * len(y), len(y))
        if world.rank == 0:
            with open(out, "a") as file:
                file.write(f'{{"step": {step}, "loss": {mean!r}}}\\n')
if allowed_mib != "0":
    peaks = [GROUP / name for name in ("memory.max_usage_in_bytes", "memory.peak")]
    print("peak", *(path.read_text() for path in peaks if path.exists()), flush=True)
"""
LIMITED = "import signal\n" + SCRIPT + MODEL + TRAINING
ALONE = "GROUP = None\n" + MODEL + TRAINING


BLOCKS, ALLOWED_MIB, RANKS, FEWER = 48, 255, 5, 4
STATES_BYTES = 16  # of a parameter: itself, its gradient, two states of Adam


def run_limited(folder, name, number, layout="zero3", die_at=-1, check=True):
    parent, _ = parent_group()
    script = ranks.write(folder, LIMITED)
    with memory_groups(parent, number) as groups:
        return ranks.run(
            script, layout, BLOCKS, ALLOWED_MIB, die_at, folder / name,
            ranks=number, check=check, timeout=400, MEMORY_GROUPS=str(groups),
        )  # fmt: skip


def losses(path):
    return {one["step"]: one["loss"] for one in map(json.loads, path.read_text().splitlines())}


def exported(folder, space):
    """Return the plain model with the weights of the folder's newest checkpoint."""
    words = [ranks.PACELINE, "convert", folder / "ckpt", folder / "model.safetensors"]
    done = ranks.run_command(words, folder, ranks.environment())
    assert done.returncode == 0, done.stderr
    model = space["Model"](BLOCKS)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model


@pytest.mark.long
def test_model_beyond_the_limit_trains_is_killed_resumed_and_exported(tmp_path):
    parent, reason = parent_group()
    if parent is None:
        pytest.skip(reason)
    space = {}
    exec(MODEL, space)
    with torch.device("meta"):
        count = sum(p.numel() for p in space["Model"](BLOCKS).parameters())
    assert count * STATES_BYTES >= 1.5 * ALLOWED_MIB * MIB

    # the limit holds: a rank with the whole model is killed
    whole = run_limited(tmp_path, "whole.txt", 2, layout="data", check=False)
    assert "out of memory" in whole.stderr
    assert not (tmp_path / "ckpt").exists() or not list((tmp_path / "ckpt").glob("step-*"))

    killed = run_limited(tmp_path, "losses.txt", RANKS, die_at=5, check=False)
    assert "rank 1 was killed by SIGKILL" in killed.stderr, killed.stderr
    assert list(losses(tmp_path / "losses.txt")) == [0, 1, 2, 3, 4]
    resumed = run_limited(tmp_path, "resumed.txt", FEWER)
    assert "resuming from" in resumed.stderr
    (tmp_path / "alone").mkdir()
    script = ranks.write(tmp_path / "alone", ALONE)
    ranks.run(script, "data", BLOCKS, 0, -1, tmp_path / "alone.txt", launcher="python")
    expected = losses(tmp_path / "alone.txt")
    assert len(expected) == 8
    found = losses(tmp_path / "losses.txt") | losses(tmp_path / "resumed.txt")
    assert found == pytest.approx(expected, rel=1e-4)

    x, _ = space["data"]()
    with torch.no_grad():
        one, other = (exported(folder, space)(x) for folder in (tmp_path, tmp_path / "alone"))
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
