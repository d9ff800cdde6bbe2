"""A Loader under world.shard: N ranks give the result of one process, also after a kill."""

import json
import subprocess

import numpy as np
import pytest
import ranks
import sets
import torch

from paceline.data import pack

TRAIN = """
    import os, signal, sys
    import torch
    from torch import nn
    import paceline
    from paceline.data import Loader

    def noisy(x, rng):
        return x + rng.normal(scale=0.1, size=x.shape).astype("float32")

    world = paceline.init(progress=False)
    folder, out, kill = sys.argv[1], sys.argv[2], int(sys.argv[3])
    loader = world.shard(Loader(folder, 4, shuffle=True, transform=noisy), global_batch=12)
    validation = world.shard(Loader(folder, 7), every_sample_once=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 7))
    model, optimizer = world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05))
    steps = 0
    for epoch in world.epochs(3, checkpoint=out + ".ckpt", every=3):
        for x, y in world.batches(loader):
            world.backward(nn.functional.cross_entropy(model(x), y))
            world.step(optimizer)
            steps += 1
            if steps == kill and not os.path.exists(out + ".killed"):
                if world.rank == 0:
                    open(out + ".killed", "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
        score = world.meter()
        for x, y in world.batches(validation):
            score.add(seen=len(y), labels=y.sum())
    sums = score.sum("seen", "labels")
    if world.rank == 0:
        torch.save((getattr(model, "module", model).state_dict(), sums), out)
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("set")
    x, y = sets.arrays(50)
    pack(x / 50, folder / "out", y, shard_bytes=500)
    return folder / "out"


def test_training_on_ranks_and_after_restart_matches_one_process(tmp_path, packed):
    script = ranks.write(tmp_path, TRAIN)
    found = {}
    for name, count, launcher, kill in (
        ("alone", 1, "python", 0),
        ("ranks", 2, "paceline", 0),
        ("killed", 3, "paceline --max-restarts 1", 10),
    ):
        ranks.run(script, packed, tmp_path / name, kill, ranks=count, launcher=launcher)
        found[name] = torch.load(tmp_path / name)
    assert (tmp_path / "killed.killed").exists()
    labels = int((np.arange(50) % 7).sum())
    for name in ("alone", "ranks", "killed"):
        weights, sums = found[name]
        assert sums == (50.0, labels)
        for key, value in found["alone"][0].items():
            assert torch.allclose(weights[key].cpu(), value, atol=1e-6), (name, key)


PLAIN = """
    import sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DistributedSampler
    from paceline.data import Loader, Shards

    def work(x):
        return x * 2

    dist.init_process_group("gloo")
    shards = Shards(sys.argv[1])
    sampler = DistributedSampler(shards)
    processes = sys.argv[2] == "processes"
    loader = Loader(shards, 5, sampler=sampler, transform=work, num_workers=2, processes=processes)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(12, 7)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_loader_in_plain_script_is_recorded(tmp_path, packed, kind):
    script = ranks.write(tmp_path, PLAIN)
    record = tmp_path / "record"
    ranks.run(script, packed, kind, launcher=f"paceline --record {record}")
    words = [ranks.PACELINE, "report", "--json", str(record)]
    report = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert report["ranks"] == [0, 1]
    assert report["steps"] == 20
    assert report["samples"] == (20 - 1) * 10
    assert all(rank["input"] > 0 for rank in report["states"])
    loading = report["loading"]
    assert (loading["workers"], loading["processes"]) == (2, kind == "processes")
    assert 0 < loading["cores"] < 2
