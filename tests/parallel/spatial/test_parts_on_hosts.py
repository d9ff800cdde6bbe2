"""A training on parts of images that is killed continues on other parts, on hosts of the test
cluster.
"""

import pytest
import ranks

SCRIPT = """
    import os, signal, sys
    from pathlib import Path
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline
    from paceline.checkpoint.checkpoint_folder import list_checkpoints

    layout, is_killed = sys.argv[1], sys.argv[2] == "killed"
    folder = Path("checkpoints")
    world = paceline.init(seed=3, progress=False)
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
            self.b, self.up = nn.Conv2d(4, 8, 3, 2, 1), nn.ConvTranspose2d(8, 4, 2, 2)
            self.head = nn.Conv2d(8, 3, 5, padding=2, padding_mode="circular")

        def forward(self, x):
            a = F.relu(self.norm(self.a(x)))
            return self.head(torch.cat([a, F.relu(self.up(self.b(a)))], 1))

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = world.distribute(model, optimizer, layout=layout)
    draw = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(24, 1, 14, 10, generator=draw),
                         torch.randint(0, 3, (24, 14, 10), generator=draw))
    loader = world.shard(DataLoader(data, batch_size=2, shuffle=True), global_batch=2)
    newest = lambda: next((p.name for p in list_checkpoints(folder)), "")
    first, done = newest(), 0
    for epoch in world.epochs(4, checkpoint=folder, every=1):
        meter = world.meter()
        for x, y in world.batches(loader):
            loss = F.cross_entropy(model(x), y)
            world.backward(loss)
            meter.add(loss=loss * len(y), count=len(y))
            world.step(optimizer, clip=0.5)
            done += 1
            if is_killed and world.rank == 0 and done > 1 and newest() != first:
                os.kill(os.getpid(), signal.SIGKILL)
        value = meter.ratio("loss", "count")
        if world.rank == 0:
            print(f"LOSS {epoch} {value:.12f}", flush=True)
    """


@pytest.mark.long
def test_a_killed_training_continues_on_other_parts(hosts, shared_folder):
    script = ranks.write(shared_folder, SCRIPT)

    def run(layout, folder, how, check=True):
        folder.mkdir(exist_ok=True)
        where = ("-n", "1") if layout == "data" else ("-H", "host1:2,host2:2")
        host = "host1" if layout == "data" else "host0"
        words = (ranks.PACELINE, "run", "--fresh", *where, script, layout, how)
        env = {"OMP_NUM_THREADS": "1"}
        return hosts.run(host, *words, cwd=folder, env=env, timeout=180, check=check)

    def losses(done):
        lines = (line.partition("LOSS ")[2] for line in done.stdout.splitlines())
        return dict(line.split() for line in lines if line)

    expected = losses(run("data", shared_folder / "alone", "whole"))
    assert len(expected) == 4
    found = {}
    for layout in ("h2 x w2", "w4", "h2 x dp2"):
        done = run(layout, shared_folder / "moved", "killed", check=False)
        assert done.returncode, f"{layout} was not killed\n{done.stdout}\n{done.stderr}"
        assert "signal 9" in done.stderr or "SIGKILL" in done.stderr, done.stderr
        found |= losses(done)
    found |= losses(run("h4", shared_folder / "moved", "whole"))
    assert set(found) == set(expected)
    for epoch, value in expected.items():
        assert float(found[epoch]) == pytest.approx(float(value), rel=1e-9)
