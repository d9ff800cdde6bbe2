"""``paceline run --show-memory``: the memory of a script in each layout, before it trains."""

import json
import re

import pytest
import ranks

from paceline.cost.layout_memory import LAYOUTS

WORLD = """
    import sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    world = paceline.init(precision="bf16")

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)
        def forward(self, x):
            return self.b(nn.functional.gelu(self.a(x)))

    def make():
        blocks = (Block() for _ in range(4))
        return nn.Sequential(nn.Linear(16, 64), *blocks, nn.Linear(64, 3))

    if "deferred" in sys.argv:
        with world.deferred():
            model = make()
    else:
        model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer = world.distribute(model, optimizer, accumulate=2, layout="auto")
    data = TensorDataset(torch.randn(640, 16), torch.randint(3, (640,)))
    loader = world.shard(DataLoader(data, batch_size=16))
    meter = world.meter()
    for epoch in world.epochs(3, checkpoint="run/checkpoints"):
        for x, y in world.batches(loader):
            output = model(x)
            loss = nn.functional.cross_entropy(output, y)
            meter.add(loss=loss.item() * len(y), count=len(y))
            right = (output.argmax(1) == y).sum().item()
            world.backward(loss)
            if world.step(optimizer, clip=1.0):
                schedule.step()
    print("trained", flush=True)
    """

DDP = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo")
    net = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.LSTM(512, 32))
    early = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = DDP(net)
    for step in range(100):
        x = torch.randn(8, 10, 16)
        with model.no_sync():
            model(x)[0].square().mean().backward()
        loss = model(x)[0].square().mean()
        loss.backward()
        total = torch.zeros(())
        total += loss.detach()
        print(f"loss {float(total):.3f}") if step < 2 else None
        early.step()
        early.zero_grad()
    print("trained", flush=True)
    """


def shown(tmp_path, text, *args, count=4):
    """Return the process and the JSON of --show-memory."""
    script, out = ranks.write(tmp_path, text), tmp_path / "memory.json"
    done = ranks.run(script, *args, ranks=count, launcher=f"paceline --show-memory --json={out}")
    assert "trained" not in done.stdout
    return done, json.loads(out.read_text())


LIMITED = """
    import torch
    from torch import nn
    import paceline

    world = paceline.init()
    blocks = (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3))
    model = nn.Sequential(*blocks, nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 8, 16)
    model, optimizer = world.distribute(
        *(model, optimizer), layout="auto", example_inputs=(x,), recompute="blocks",
        memory_budget=0.25,
    )
    for step in range(4):
        world.backward(model(x).square().mean())
        world.step(optimizer)
    """


@pytest.mark.long
def test_choice_is_that_of_layout_auto(tmp_path):
    done, found = shown(tmp_path, LIMITED, count=2)
    trained = ranks.run(tmp_path / "script.py", ranks=2, launcher="paceline")
    said = re.search(r"layout='auto': (.+?) needs .* of ([\d.]+ \w+)", trained.stderr)
    chosen = re.search(r"^(\S.*?) needs .* of ([\d.]+ \w+)", done.stderr, re.MULTILINE)
    assert said[1] == chosen[1] == "data + recompute"
    assert said[2] == chosen[2] == "256.0 MiB"
    assert found["available_bytes"] == 1 << 28
    assert "loss function is left out" in trained.stderr


@pytest.mark.parametrize("args", [[], ["deferred"]])
def test_script_with_world(tmp_path, args):
    done, found = shown(tmp_path, WORLD, *args)
    assert (found["format"], found["version"], found["ranks"]) == ("paceline-memory", 1, 4)
    rows = {(row["layout"], row["recompute"]): row for row in found["layouts"]}
    assert list(rows) == [(str(one), way) for way in (None, "blocks") for one in LAYOUTS]
    data, sharded = rows["data", None], rows["zero3", None]
    count = (16 + 1) * 64 + 4 * (65 * 256 + 257 * 64) + 65 * 3
    assert data["parameters_bytes"] == 4 * count
    assert data["gradients_bytes"] == 2 * 4 * count  # accumulated ones, and DDP's buckets
    assert data["optimizer_states_bytes"] >= 8 * count
    assert sharded["peak_bytes"] < data["peak_bytes"]
    assert data["peak_bytes"] == sum(
        data[f"{name}_bytes"]
        for name in (
            *("parameters", "buffers", "gradients", "optimizer_states", "activations"),
            *("temporary", "unsharded"),
        )
    )
    assert data["line"].startswith("script.py:")
    assert all(row["fits"] for row in rows.values())
    for text in ("predicted for 4 ranks", "zero3", "optimizer states", "data needs "):
        assert text in done.stderr
    assert not (tmp_path / "run").exists()  # no checkpoint


def test_unchanged_script_with_ddp(tmp_path):
    done, found = shown(tmp_path, DDP, count=2)
    count = 17 * 512 + 4 * 32 * (512 + 32 + 2)
    data = found["layouts"][0]
    assert data["parameters_bytes"] == data["gradients_bytes"] == 4 * count
    assert data["optimizer_states_bytes"] >= 4 * count
    assert [row["recompute"] for row in found["layouts"]] == [None] * 4  # no repeated blocks
    assert "predicted for 2 ranks" in done.stderr


REASONS = {
    "no model": (
        "model = torch.nn.Linear(3, 3)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(9):\n    model(torch.ones(2, 3)).sum().backward()\n    optimizer.step()",
        "no model was given to world.distribute or DistributedDataParallel",
    ),
    "too short": (
        "import paceline\nworld = paceline.init()\nmodel = torch.nn.Linear(3, 3)\n"
        "model, optimizer = world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "world.backward(model(torch.ones(2, 3)).sum())\nworld.step(optimizer)",
        "the script has ended after 1 of 3 optimizer steps. HINT",
    ),
    "reads values": (
        "import paceline\nworld = paceline.init()\nmodel = torch.nn.Linear(3, 3)\n"
        "model = world.distribute(model)\nmodel(torch.ones(2, 3)).detach().numpy()",
        "the training step reads the values of a tensor",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_script_that_can_not_be_traced(tmp_path, name):
    text, reason = REASONS[name]
    script = ranks.write(tmp_path, f"import torch\n{text}\n")
    done = ranks.run(script, launcher="paceline --show-memory", check=False)
    assert done.returncode == 1
    assert reason in done.stderr
