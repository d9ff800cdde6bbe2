"""Checkpoints of a GPU: continued on the CPU and the reverse, after a kill, and exported."""

import pytest
import torch
from on_gpu import CUDA, command, run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.gpu


def train(world, folder, epochs, layout="data", precision=torch.float64, offload=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.0), nn.Tanh(), nn.Linear(16, 1))
    model = model.to(precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer = world.distribute(model, optimizer, layout=layout, offload=offload)
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1), dtype=precision)
    loader = world.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True))
    for _ in world.epochs(epochs, checkpoint=folder):
        for a, b in world.batches(loader):
            world.backward((model(a) - b).square().mean())
            world.step(optimizer)
    world.close()
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("layout", ["data", "zero1", "zero3"])
@pytest.mark.parametrize("devices", ["gpu to cpu", "cpu to gpu", "gpu to gpu"])
def test_checkpoint_continues_on_another_device(make_world, tmp_path, devices, layout):
    kind = {"gpu": "cuda" if CUDA else "cpu", "cpu": "cpu"}
    first, _, second = devices.split()
    expected = train(make_world(seed=1, device=kind[first]), tmp_path / "whole", 3, layout)
    train(make_world(seed=1, device=kind[first]), tmp_path / "part", 1, layout)
    found = train(make_world(seed=1, device=kind[second]), tmp_path / "part", 3, layout)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("pair", [(None, "optimizer"), ("optimizer", None)])
def test_checkpoint_continues_with_and_without_offload(make_world, tmp_path, pair):
    expected = train(make_world(seed=1), tmp_path / "whole", 3)
    train(make_world(seed=1), tmp_path / "part", 1, offload=pair[0])
    found = train(make_world(seed=1), tmp_path / "part", 3, offload=pair[1])
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


RESUMED = """
    import os, signal, sys, torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline
    folder, die = sys.argv[1], int(sys.argv[2])
    world = paceline.init(seed=3, progress=False, device=DEVICE)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 1))
    model, optimizer = world.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01))
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    loader = world.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True))
    for epoch in world.epochs(3, checkpoint=folder, every=5):
        for a, b in world.batches(loader):
            world.backward((model(a) - b).square().mean())
            world.step(optimizer)
            if world._recorder.step == die:
                world._finish.saver.wait() if hasattr(world._finish.saver, "wait") else None
                os.kill(os.getpid(), signal.SIGKILL)
    total = sum(float(p.double().abs().sum()) for p in model.parameters())
    print(f"result {total:.12f}")
"""


@pytest.mark.limit(100)
@pytest.mark.parametrize("number", [1])
def test_killed_run_resumes_with_the_same_random_numbers_of_the_gpu(tmp_path, number):
    whole = run(tmp_path, RESUMED, tmp_path / "a", 0, number=number).stdout
    died = run(tmp_path, RESUMED, tmp_path / "b", 14, number=number, check=False)
    assert died.returncode != 0
    resumed = run(tmp_path, RESUMED, tmp_path / "b", 0, number=number)
    assert "resuming from" in resumed.stderr
    assert whole.split()[-1] == resumed.stdout.split()[-1]


def test_model_is_exported(make_world, tmp_path):
    expected = train(make_world(seed=1), tmp_path / "ckpt", 1, precision=torch.float32)
    command(tmp_path, "convert", "ckpt", "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    for one, other in zip(expected, found.values(), strict=True):
        assert other.device.type == "cpu"
        assert torch.equal(one, other)
