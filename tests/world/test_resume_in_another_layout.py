"""A job that stops inside an epoch continues in another layout, on another number of ranks."""

import pytest
import ranks

SCRIPT = """
    import sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    layout, last = sys.argv[1], int(sys.argv[2])
    world = paceline.init(seed=1, progress=False)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = world.distribute(model, optimizer, layout=layout)
    data = torch.randn(96, 5, generator=torch.Generator().manual_seed(2))
    loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), shuffle=True)
    loader = world.shard(loader, global_batch=12)
    done = 0
    for epoch in world.epochs(2, checkpoint="ckpt", every=1):
        for x, y in world.batches(loader):
            world.backward((model(x) - y).square().mean())
            world.step(optimizer)
            done += 1
            if done == last:
                sys.exit(0)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    total = sum(float(p.detach().double().square().sum()) for p in whole)
    if world.rank == 0:
        print(f"norm {total:.9f} after {done} steps", flush=True)
    """


def norm(folder, layout, number, last=-1):
    folder.mkdir(exist_ok=True)
    script = ranks.write(folder, SCRIPT)
    done = ranks.run(script, layout, last, ranks=number)
    found = [line.split() for line in ranks.untagged(done.stdout) if line.startswith("norm")]
    return (float(found[0][1]), int(found[0][3])) if found else None


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("zero3", 2), ("data", 1)),
        pytest.param(("data", 2), ("zero1", 3), marks=pytest.mark.long),
        pytest.param(("zero2", 2), ("zero3", 4), marks=pytest.mark.long),
    ],
)
def test_training_continues_in_another_layout(tmp_path, first, then):
    whole, _ = norm(tmp_path / "whole", "data", 1)
    assert norm(tmp_path / "moved", *first, last=5) is None
    found, steps = norm(tmp_path / "moved", *then)
    assert found == pytest.approx(whole, rel=1e-6)
    assert 16 - 5 <= steps < 16
