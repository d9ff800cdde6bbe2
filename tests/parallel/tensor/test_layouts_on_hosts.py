"""A training that is killed in one layout continues in another, on hosts of the test cluster."""

from itertools import pairwise

import pytest
import ranks

SCRIPT = """
    import os, signal, sys
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline
    from paceline.checkpoint.checkpoint_folder import list_checkpoints
    from pathlib import Path

    layout, is_killed = sys.argv[1], sys.argv[2] == "killed"
    folder = Path("checkpoints")
    world = paceline.init(seed=3, progress=False)
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(16, 8)
            self.encoder = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=True)
            self.lstm, self.out = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 16, bias=False)
            self.out.weight = self.embedding.weight

        def forward(self, x):
            return self.out(self.lstm(self.encoder(self.embedding(x)))[0]).flatten(0, 1)

    rules = {
        "embedding": "vocabulary", "encoder.self_attn": "heads", "encoder.linear1": "column",
        "encoder.linear2": "row", "encoder.norm*": "sequence", "lstm": "column", "out": "column",
    }
    known = paceline.Layout.parse(layout)
    if known.zero:
        del rules["encoder.norm*"]
    rules = rules if known.tp > 1 else {}
    layout = paceline.Layout(dp=known.dp, zero=known.zero, tp=known.tp, rules=rules)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = world.distribute(model, optimizer, layout=layout)
    tokens = torch.randint(0, 16, (STEPS, 4), generator=torch.Generator().manual_seed(7))
    loader = DataLoader(TensorDataset(tokens, tokens.roll(-1, 1)), batch_size=4, shuffle=True)
    loader = world.shard(loader, global_batch=4)
    newest = lambda: next((p.name for p in list_checkpoints(folder)), "")
    first, done = newest(), 0
    for epoch in world.epochs(6, checkpoint=folder, every=1):
        meter = world.meter()
        for x, y in world.batches(loader):
            loss = world.forward_backward(model, x, y.flatten(), loss=F.cross_entropy)
            meter.add(loss=loss * len(y), count=len(y))
            world.step(optimizer, clip=0.5)
            done += 1
            if is_killed and world.rank == 0 and done > 1 and newest() != first:
                os.kill(os.getpid(), signal.SIGKILL)
        value = meter.ratio("loss", "count")
        if world.rank == 0:
            print(f"LOSS {epoch} {value:.12f}", flush=True)
    """.replace("STEPS", "96")
LAYOUTS = ["dp4", "tp2 x dp2", "tp4", "zero3 x tp2", "data"]


def circuit(names):
    """Return a way through all ordered pairs of names: each pair follows each other once."""
    left = {name: [other for other in names if other != name] for name in names}
    waiting, found = [names[-1]], []
    while waiting:
        if left[waiting[-1]]:
            waiting.append(left[waiting[-1]].pop())
        else:
            found.append(waiting.pop())
    return found[::-1]


@pytest.mark.long
def test_each_layout_continues_what_each_other_one_has_saved(hosts, shared_folder):
    """Killed after a checkpoint in one layout, continued in the next one, for all pairs."""
    script = ranks.write(shared_folder, SCRIPT)
    env = ranks.environment(OMP_NUM_THREADS="1")
    env = {name: value for name, value in env.items() if name == "OMP_NUM_THREADS"}

    def run(layout, folder, how, check=True):
        folder.mkdir(exist_ok=True)
        where = ("-n", "1") if layout == "data" else ("-H", "host1:2,host2:2")
        host = "host1" if layout == "data" else "host0"
        words = (ranks.PACELINE, "run", "--fresh", *where, script, layout, how)
        return hosts.run(host, *words, cwd=folder, env=env, timeout=180, check=check)

    def losses(done):
        lines = (line.partition("LOSS ")[2] for line in done.stdout.splitlines())
        return dict(line.split() for line in lines if line)

    expected = losses(run("data", shared_folder / "alone", "whole"))
    assert len(expected) == 6
    order = circuit(LAYOUTS)
    assert set(pairwise(order)) == {(a, b) for a in LAYOUTS for b in LAYOUTS if a != b}
    found = {}
    for layout in order[:-1]:
        done = run(layout, shared_folder / "moved", "killed", check=False)
        assert done.returncode, f"{layout} was not killed\n{done.stdout}\n{done.stderr}"
        assert "signal 9" in done.stderr or "SIGKILL" in done.stderr, done.stderr
        found |= losses(done)
    found |= losses(run(order[-1], shared_folder / "moved", "whole"))
    assert set(found) == set(expected)
    for epoch, value in expected.items():
        assert float(found[epoch]) == pytest.approx(float(value), rel=1e-9)
