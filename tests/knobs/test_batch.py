"""The knob of the global batch: samples of a step, whichever way the script loads its batches."""

import json

import pytest
import ranks

from paceline.analyze.records.load_run import load_run
from paceline.analyze.scaling.figures_of_run import figures_of_run
from paceline.knobs.settings import Setting, write_settings

PLAIN = """
    import sys, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    kind = sys.argv[1]
    data = TensorDataset(torch.randn(96, 4))
    sampler = DistributedSampler(data, shuffle=kind != "in order")
    options = {"batch_size": 4, "sampler": sampler, "drop_last": True}
    if kind == "own batches":
        options = {"batch_sampler": [[0, 1], [2, 3]] * 6}
    loader = DataLoader(data, **options)
    batches = len(loader)
    held_out = DataLoader(data, 8)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for i, (x,) in enumerate(loader):
            model(x).square().mean().backward()
            if kind != "accumulates" or i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            sizes = {len(model(x)) for x, in held_out}
    if dist.get_rank() == 0:
        print("batches", batches, "held out", sizes)
    dist.destroy_process_group()
    """
SHARDED = """
    import torch, paceline
    from torch.utils.data import DataLoader, TensorDataset

    world = paceline.init(seed=0)
    data = TensorDataset(torch.randn(96, 4))
    loader = world.shard(DataLoader(data, 4, shuffle=True))
    held_out = world.shard(DataLoader(data, 8), every_sample_once=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer = world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in world.epochs(2):
        for x, in world.batches(loader):
            world.backward(model(x).square().mean())
            world.step(optimizer)
        sizes = {len(x) for x, in world.batches(held_out)}
    if world.rank == 0:
        print("held out", sizes)
    """


def train(folder, script, *args, batch):
    done, figures, knob = trained(folder, script, *args, batch=batch)
    return done, figures.usual_samples, knob


def trained(folder, script, *args, batch):
    settings = folder / "batch.toml"
    write_settings(settings, {"global-batch": Setting(batch)}, {})
    path = ranks.write(folder, script)
    launcher = f"paceline --settings {settings} --record {folder / 'record'}"
    done = ranks.run(path, *args, launcher=launcher)
    run = load_run(folder / "record")
    knob = run.records[0].meta["knobs"]["global-batch"]
    return done, figures_of_run(run), knob


@pytest.mark.parametrize(
    ("script", "args", "how"),
    [
        (PLAIN, ("shuffled",), "loader"),
        (PLAIN, ("in order",), None),
        (SHARDED, (), "world.shard"),
    ],
)
def test_steps_have_the_requested_samples(tmp_path, script, args, how):
    done, samples, knob = train(tmp_path, script, *args, batch=32)
    assert samples == 32
    assert knob == {"set": True, "why_not": "", **({"how": how} if how else {})}
    assert "held out {8}" in done.stdout  # validation is unchanged
    if args == ("shuffled",):
        assert "batches 3 " in done.stdout  # len(loader) before the first pass


def test_batches_of_the_script_are_left_and_reported(tmp_path):
    done, _, knob = train(tmp_path, PLAIN, "own batches", batch=32)
    assert not knob["set"]
    assert "batch_sampler (list) chooses the batches" in json.dumps(knob)
    assert "global-batch has no effect" in done.stderr


def test_step_of_a_script_that_accumulates_has_several_batches(tmp_path):
    _, figures, _ = trained(tmp_path, PLAIN, "accumulates", batch=4)
    assert (figures.batches_per_step, figures.usual_samples) == (4, 16)
