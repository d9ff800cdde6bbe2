"""What ``world`` promises holds in a pipeline: loops, clipping, meters, checkpoints, errors."""

import json
import re
import shutil
from pathlib import Path

import pipelined_models
import pytest
import ranks
import torch

from paceline import Layout
from paceline.parallel.mesh import Mesh
from paceline.parallel.pipeline.executor import Lane
from paceline.parallel.pipeline.strategy import Pipeline
from paceline.parallel.strategy.parallel_strategy import DistributionRequest

LOOP = """
    import sys
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    import paceline
    from pipelined_models import Transformer, token_loss

    layout, epochs, out, dropout = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    world = paceline.init(seed=3)
    torch.manual_seed(1 + world.rank)  # rank 0's parameters are those of all
    model = Transformer(dropout=dropout)
    optimizer = torch.optim.Adam([
        {"params": [*model.blocks.parameters()], "lr": 0.01},
        {"params": [model.positions, *model.norm.parameters(), model.tokens.weight]},
    ], lr=0.02)
    model, optimizer = world.distribute(model, optimizer, layout=layout, accumulate=2)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(11, (22, 5), generator=generator)
    data = TensorDataset(ids, ids.roll(1, 1))
    loader = world.shard(DataLoader(data, batch_size=2, shuffle=True), global_batch=4)
    validation = world.shard(DataLoader(data, batch_size=5), every_sample_once=True)
    lines = []
    for epoch in world.epochs(epochs, checkpoint="checkpoints"):
        meter = world.meter()
        for x, y in world.batches(loader):
            loss = world.forward_backward(model, x, y, loss=token_loss)
            meter.add(loss=loss * len(y), count=len(y))
            world.step(optimizer, clip=0.3)
        checked = world.meter()
        for x, y in world.batches(validation):
            checked.add(right=(model(x).argmax(-1) == y).sum(), count=len(y))
        lines.append([meter.ratio("loss", "count"), *checked.sum("right", "count")])
    if world.rank == 0:
        torch.save(lines, out)
    """


@pytest.fixture
def folder(tmp_path):
    shutil.copy(Path(pipelined_models.__file__), tmp_path)
    return tmp_path


def saved(folder):
    from paceline.checkpoint.checkpoint_folder import list_checkpoints
    from paceline.checkpoint.saver import load_checkpoint
    from paceline.checkpoint.sharded_tensor import whole

    shared, _, _ = load_checkpoint(list_checkpoints(folder)[0])
    weights = {name: whole(tensor) for name, tensor in shared["models"][0].items()}
    states = shared["optimizers"][0]["state"]
    return weights, {n: whole(of["exp_avg"]) for n, of in states.items()}


@pytest.mark.long
def test_one_training_moves_through_layouts_and_equals_one_process(folder):
    script = ranks.write(folder, LOOP)
    alone = folder / "alone"
    alone.mkdir()
    for name in (script.name, "pipelined_models.py"):
        shutil.copy(folder / name, alone)
    ranks.run(alone / script.name, "data", 8, "out.pt", 0, ranks=1, launcher="python")
    lines = []
    for epochs, layout, count in (
        (1, "pp2", 2),
        (2, "data", 2),
        (3, "pp4", 4),
        (4, "pp2 x dp2", 4),
        (5, "pp2 x zero1", 4),
        (6, "pp2 x zero3", 4),
        (7, "pp2 x tp2", 4),
        (8, "pp2", 2),
    ):
        report = f"paceline --json={folder}/{epochs}.json"
        done = ranks.run(script, layout, epochs, "out.pt", 0, ranks=count, launcher=report)
        lines += torch.load(folder / "out.pt")
        assert "warning" not in done.stderr
        assert ("pipeline: stage 0: " in done.stderr) == layout.startswith("pp")
    expected = torch.load(alone / "out.pt")
    for found, wanted in zip(lines, expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-3)
    for found, wanted in zip(
        saved(folder / "checkpoints"), saved(alone / "checkpoints"), strict=True
    ):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)
    report = json.loads((folder / "4.json").read_text())
    names = " ".join(group["name"] for group in report["groups"])
    assert "stage (data 0) #" in names
    assert "data (stage 1) #" in names


@pytest.mark.long
def test_dropout_is_that_of_the_seed_in_any_schedule_and_after_a_resume(folder):
    script = ranks.write(folder, LOOP)
    found = []
    for number, (layout, count) in enumerate(
        [("pp2", 2), ("pp2 + schedule=gpipe", 2), ("pp4", 4), ("pp2", 2)]
    ):
        for epochs in (1, 2) if number == 3 else (2,):  # the last one resumes
            ranks.run(script, layout, epochs, "out.pt", 0.5, ranks=count)
        found.append(torch.load(folder / "out.pt")[-1])
        shutil.rmtree(folder / "checkpoints")
    assert found[0] == found[1] == found[3]
    assert found[2] == pytest.approx(found[0], rel=1e-4)


MISTAKES = """
    import torch
    from torch import nn
    import paceline
    from pipelined_models import Transformer, token_loss

    world = paceline.init(seed=3, progress=False)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = world.distribute(model, optimizer, layout="pp2 + micro-batches=4")
    loss = nn.functional.mse_loss

    def attempt(call):
        try:
            call()
        except ValueError as error:
            print(error, flush=True)

    x = torch.ones(8, 3)
    attempt(lambda: model(x))
    attempt(lambda: world.forward_backward(model, x[:3], x[:3], loss=loss))
    attempt(lambda: world.forward_backward(model, x, x[:4], loss=loss))
    n = 8 + world.rank
    other = torch.ones(n, 3)
    attempt(lambda: world.forward_backward(model, other, other, loss=loss))
    attempt(lambda: world.forward_backward(model, x * torch.nan, x, loss=loss))
    optimizer.zero_grad()
    world.forward_backward(model, x, x, loss=loss)
    world.step(optimizer)

    def with_penalty(outputs, targets):
        return loss(outputs, targets) + sum(p.square().sum() for p in model.parameters())

    try:
        world.forward_backward(model, x, x, loss=with_penalty)
    except ValueError as error:
        print(error, flush=True)
        raise
    """


def test_mistakes_are_errors_on_all_ranks_and_training_goes_on(folder):
    done = ranks.run(ranks.write(folder, MISTAKES), check=False)
    lines = ranks.untagged(done.stdout)
    text = "\n".join(lines)
    assert "which can't be called in training. HINT: loss = world.forward_backward(" in text
    assert "a batch of 3 samples can't be divided into 4 micro-batches. HINT: " in text
    assert "their tensors have 8 and 4 there. HINT: " in text
    assert "rank 1 (data 0, stage 1) has another batch or model than rank 0 (data 0" in text
    assert "the loss is nan on rank 0 (data 0, stage 0)" in text
    assert "the loss is nan on rank 1 (data 0, stage 1)" in text
    assert re.search(r"the loss uses the parameter 1\.(weight|bias) beside the outputs", text)
    assert done.returncode


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (
            "pp2 x tp2 + schedule=zero-bubble",
            "tp with zero-bubble is not implemented yet. HINT: schedule=1f1b",
        ),
        ("pp2 x h2", "pp together with h is not implemented yet. HINT: layout='pp2'"),
        ("pp2 x zero2/host", "pp together with shards on host is not implemented yet. HINT: zero2"),
        (
            "pp2 + recompute + schedule=zero-bubble",
            "zero-bubble is not implemented yet. HINT: sche",
        ),
        ("pp2 + recompute=auto", "recompute='auto' is not implemented yet. HINT: recompute="),
    ],
)
def test_other_axes_are_refused(layout, text):
    request = DistributionRequest(Layout.parse(layout), Mesh(0, 4), torch.device("cpu"))
    with pytest.raises(ValueError, match=text.replace(".", r"\.")):
        Pipeline(request)


KILLED = """
    import os
    import signal
    import torch
    from torch import nn
    import paceline

    world = paceline.init(seed=3, progress=False)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = world.distribute(model, optimizer, layout="pp3")
    x = torch.ones(8, 3)

    def loss(outputs, targets):
        return nn.functional.mse_loss(outputs, targets)

    for step in range(100):
        if step == 3 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.forward_backward(model, x, x, loss=loss)
        world.step(optimizer)
    """


def test_a_rank_that_dies_is_named_with_its_stage(folder):
    """Here by the launcher, which ends the other ranks."""
    done = ranks.run(ranks.write(folder, KILLED), ranks=3, check=False, timeout=60)
    assert done.returncode
    assert re.search(r"rank 1( \(.*stage 1\))? .*killed", done.stderr)


def test_a_stage_whose_connection_breaks_is_named():
    """Here by its neighbour, where no launcher watches."""

    class Broken:
        def wait(self):
            raise RuntimeError("Connection closed by peer")

    mesh = Mesh(0, 2)
    mesh.arrange(Layout(pp=2), ["a", "a"])
    lane = Lane(mesh, None, 1, 0)
    lane._expected.append(([], [Broken()]))
    with pytest.raises(RuntimeError, match=r"rank 0 \(data 0, stage 0\) lost rank 1 \(data 0, s"):
        lane.receive()
