"""Layouts that only these tests have (support/toy_layouts.py) work like those of Paceline."""

import json
import shutil
from pathlib import Path

import pytest
import ranks
import torch
import toy_layouts

SCRIPT = """
    import sys
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline
    import toy_layouts

    layout, epochs, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    toy_layouts.install()
    world = paceline.init(seed=3, progress=False)
    torch.manual_seed(1 + world.rank)  # rank 0's parameters are those of all
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 2))
    )
    optimizer = torch.optim.Adam([
        {"params": [*model[1].parameters()], "lr": 0.05}, {"params": [*model[0].parameters()]}
    ], lr=0.02)
    model, optimizer = world.distribute(model, optimizer, layout=layout, accumulate=2)
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(22, 4, generator=generator), torch.arange(22) % 2)
    loader = world.shard(DataLoader(data, batch_size=2, shuffle=True), global_batch=4)
    validation = world.shard(DataLoader(data, batch_size=5), every_sample_once=True)
    lines = []
    for epoch in world.epochs(epochs, checkpoint="checkpoints"):
        meter = world.meter()
        for x, y in world.batches(loader):
            loss = world.forward_backward(model, x, y, loss=F.cross_entropy)
            meter.add(loss=loss * len(y), count=len(y))
            world.step(optimizer, clip=0.3)
        checked = world.meter()
        for x, y in world.batches(validation):
            checked.add(right=(model(x).argmax(1) == y).sum(), count=len(y))
        lines.append([meter.ratio("loss", "count"), *checked.sum("right", "count")])
    drawn = torch.rand(1).item()
    print("place", world.mesh.name(), world.mesh.data_rank, f"{drawn:.6f}", flush=True)
    if world.rank == 0:
        torch.save(lines, out)
    """


@pytest.fixture
def script(tmp_path):
    shutil.copy(Path(toy_layouts.__file__), tmp_path)
    return ranks.write(tmp_path, SCRIPT)


def saved(folder):
    from paceline.checkpoint.checkpoint_folder import list_checkpoints
    from paceline.checkpoint.saver import load_checkpoint
    from paceline.checkpoint.sharded_tensor import whole

    shared, _, _ = load_checkpoint(list_checkpoints(folder)[0])
    weights = {name: whole(tensor) for name, tensor in shared["models"][0].items()}
    states = shared["optimizers"][0]["state"]
    return weights, {n: whole(of["exp_avg"]) for n, of in states.items()}


@pytest.mark.long
def test_one_training_moves_through_layouts_and_equals_one_process(script, tmp_path):
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    for folder in (alone, moved):
        folder.mkdir()
        shutil.copy(script, folder)
        shutil.copy(script.parent / "toy_layouts.py", folder)
    ranks.run(alone / script.name, "data", 4, "out.pt", ranks=1, launcher="python")
    lines, said = [], []
    for epochs, layout, count in (
        (1, "zero3/2", 4),
        (2, "pp2 x dp2", 4),
        (3, "dp2 x tp2", 4),
        (4, "data", 2),
    ):
        report = f"paceline --json={moved}/{epochs}.json"
        done = ranks.run(
            moved / script.name, layout, epochs, "out.pt", ranks=count, launcher=report
        )
        lines += torch.load(moved / "out.pt")
        said.append(sorted(ranks.untagged(done.stdout)))
        assert "warning" not in done.stderr
    expected = torch.load(alone / "out.pt")
    for found, wanted in zip(lines, expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)
    for found, wanted in zip(
        saved(moved / "checkpoints"), saved(alone / "checkpoints"), strict=True
    ):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    check_places(said[1])
    check_record(json.loads((moved / "2.json").read_text()))


def check_places(said):
    """Ranks that share samples draw the same numbers, and others do not."""
    places = [line.split() for line in said if line.startswith("place")]
    assert {" ".join(words[1:-2]) for words in places} == {
        *("rank 0 (data 0, stage 0)", "rank 1 (data 1, stage 0)"),
        *("rank 2 (data 0, stage 1)", "rank 3 (data 1, stage 1)"),
    }
    drawn = {(words[-2], words[-1]) for words in places}
    assert len(drawn) == 2
    assert len({number for _, number in drawn}) == 2


def check_record(report):
    """Samples are counted once, and groups have the names of their axes."""
    names = " ".join(group["name"] for group in report["groups"])
    assert "stage (data 0) #" in names
    assert "data (stage 1) #" in names
