"""What tensor layouts promise beside equality: moved checkpoints, refusals, records."""

import json
import re
import threading

import pytest
import ranks
import torch.distributed as dist

from paceline.cost.layout import Layout
from paceline.parallel.mesh import Mesh

MISTAKES = """
    import sys
    import torch
    import torch.nn.functional as F
    from torch import nn
    import paceline

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    class Net(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.kind = kind
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            h = self.up(x)
            if self.kind == "function":
                h = Double.apply(h)
            if self.kind == "in place":
                h[:, 1] = 0
            if self.kind == "piece":  # past self.up.weight
                h = h * dict(self.up.named_parameters())["weight"].sum().detach()
            out = self.down(torch.tanh(h))
            if self.kind == "size":
                out = out / sum(p.numel() for p in self.parameters())
            return out

    kind = sys.argv[1]
    world = paceline.init(progress=False, replicas="raise")
    model = Net(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = world.distribute(model, optimizer, layout="tp2")
    x, y = torch.ones(3, 4), torch.zeros(3, 4)
    loss = F.mse_loss(model(x), y)
    if kind == "penalty":
        loss = loss + sum(p.square().sum() for p in model.parameters())
    world.backward(loss)
    world.step(optimizer)
    print("trained", flush=True)
    """


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "function",
            "autograd.Function of the script, which can't divide its backward",
        ),
        (
            "in place",
            "Tensor.__setitem__ is not possible for a tensor that is divided .* HINT: the rule",
        ),
        ("piece", "a result on another rank differs|the result differs from that of the whole"),
        ("size", "code of the model uses a part as if it were whole. HINT: the rule 'replicate'"),
        ("penalty", "losses of ranks 0-1, which share samples, differ: .* HINT: compute it in the"),
    ],
)
def test_what_can_not_be_right_is_an_error_before_the_first_step(tmp_path, kind, message):
    script = ranks.write(tmp_path, MISTAKES)
    done = ranks.run(script, kind, check=False)
    assert done.returncode
    assert "trained" not in done.stdout
    assert any(re.search(message, line) for line in done.stderr.splitlines())


MOVED = """
    import sys
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    layout, epochs, folder = sys.argv[1:]
    world = paceline.init(seed=3, progress=False)
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(16, 8)
            self.encoder = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=True)
            self.lstm, self.out = nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 16)

        def forward(self, x):
            return self.out(self.lstm(self.encoder(self.embedding(x)))[0]).flatten(0, 1)

    rules = {
        "embedding": "vocabulary", "encoder.self_attn": "heads", "encoder.linear1": "column",
        "encoder.linear2": "row", "lstm": "column", "out": "column",
    }
    extents = paceline.Layout.parse(layout)
    layout = paceline.Layout(
        dp=extents.dp, zero=extents.zero, tp=extents.tp, rules=rules if extents.tp > 1 else {}
    )
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = world.distribute(model, optimizer, layout=layout)
    tokens = torch.randint(0, 16, (12, 5), generator=torch.Generator().manual_seed(7))
    data = TensorDataset(tokens, tokens.roll(-1, 1))
    loader = world.shard(DataLoader(data, batch_size=2, shuffle=True), global_batch=4)
    for epoch in world.epochs(int(epochs), checkpoint=folder):
        meter = world.meter()
        for x, y in world.batches(loader):
            loss = world.forward_backward(model, x, y.flatten(), loss=F.cross_entropy)
            meter.add(loss=loss * len(y), count=len(y))
            world.step(optimizer, clip=0.5)
        if world.rank == 0:
            print("LOSS", epoch, f"{meter.ratio('loss', 'count'):.12f}", flush=True)
        else:
            meter.ratio("loss", "count")
    """


def losses(done):
    return {line.partition("LOSS ")[2] for line in done.stdout.splitlines() if "LOSS" in line}


def check_record(report, layout, count):
    """Everything is matched, and the axes add up to what the ranks lost."""
    assert report["unmatched"] == 0
    assert report["missing_ranks"] == []
    assert not any("add up" in doubt for doubt in report["doubts"])
    axes = {axis["name"]: axis for axis in report["axes"]}
    assert axes["tensor"]["extent"] == Layout.parse(layout).tp
    assert axes["tensor"]["groups"] * axes["tensor"]["extent"] == count
    assert ("data" in axes) == ("dp2" in layout)
    assert axes["tensor"]["bytes_per_step"] > 0
    layers = {layer["name"]: layer["calls"] for layer in report["layers"]}
    assert {"embedding", "encoder.linear2", "lstm"} <= layers.keys()
    assert {call["kind"] for call in layers["encoder.linear1"]} >= {"backward"}
    exposed = sum(c["wait_s"] + c["transfer_s"] for calls in layers.values() for c in calls)
    whole = (axes["tensor"]["wait"] + axes["tensor"]["transfer"]) * report["window_s"]
    assert 0 < exposed <= whole / (report["steps"] - 1) * (1 + 1e-6)
    assert not {layer["name"] for layer in report["blocks"]} & layers.keys()
    for kind in ("wait", "transfer"):
        of_ranks = sum(rank[kind] for rank in report["states"]) / count
        assert sum(axis[kind] for axis in axes.values()) == pytest.approx(of_ranks, abs=1e-9)


def test_a_checkpoint_moves_between_layouts_and_the_record_knows_the_axis(tmp_path):
    script = ranks.write(tmp_path, MOVED)
    alone = losses(ranks.run(script, "data", 5, "alone", ranks=1, launcher="python"))
    found = set()
    for epochs, (layout, count) in enumerate(
        [
            ("dp1 x tp2", 2),
            ("dp2 x zero1 x tp2", 4),
            ("dp1 x tp4", 4),
            ("dp2 x zero3 x tp2", 4),
            ("data", 1),
        ],
        1,
    ):
        report = f"paceline --json={tmp_path}/{epochs}.json"
        launcher = report if count > 1 else "python"
        done = ranks.run(script, layout, epochs, "moved", ranks=count, launcher=launcher)
        found |= losses(done)
        if count > 1:
            check_record(json.loads((tmp_path / f"{epochs}.json").read_text()), layout, count)
    rounded = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in found}
    for line in alone:
        epoch, _, value = line.rpartition(" ")
        assert rounded[epoch] == pytest.approx(float(value), rel=1e-9)
    report = json.loads((tmp_path / "4.json").read_text())
    names = " ".join(group["name"] for group in report["groups"])
    assert "tensor (data 0)" in names
    assert "data (tensor 1)" in names


def test_an_axis_that_does_not_exchange_is_named(monkeypatch):
    mesh, blocked = Mesh(1, 4), threading.Event()
    mesh.arrange(Layout.parse("dp2 x tp2"), ["node"] * 4)
    monkeypatch.setattr(mesh, "group", lambda *axes: axes)
    monkeypatch.setattr("paceline.parallel.mesh.exchangeable", lambda number, _: number)

    def all_reduce(_, group):
        if group == ("tensor",):
            blocked.wait(20)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    expected = (
        r"rank 1 \(data 0, tensor 1\): the ranks of the axis tensor \(ranks 0-1\) could not "
        "exchange a number within 0 s. HINT: GLOO_SOCKET_IFNAME"
    )
    with pytest.raises(ValueError, match=expected):
        mesh.try_groups(0.2)
    blocked.set()
