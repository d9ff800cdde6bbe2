"""Three models in tensor layouts train as in one process, with rules and without."""

import pytest
import ranks
import torch

MODELS = """
    import math
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Attention(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads, self.qkv = heads, nn.Linear(width, 3 * width)
            self.out = nn.Linear(width, width)

        def forward(self, x):
            B, T, C = x.shape
            q, k, v = self.qkv(x).split(C, dim=2)
            shape = (B, T, self.heads, C // self.heads)
            q, k, v = (one.view(*shape).transpose(1, 2) for one in (q, k, v))
            weights = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
            hidden = torch.tril(torch.ones(T, T)) == 0
            weights = F.softmax(weights.masked_fill(hidden, float("-inf")), dim=-1)
            return self.out((weights @ v).transpose(1, 2).contiguous().view(B, T, C))

    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attention = Attention(width, heads)
            self.mlp = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
            )

        def forward(self, x):
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.places = nn.Embedding(32, 16), nn.Embedding(6, 16)
            self.blocks = nn.ModuleList(Block(16, 4) for _ in range(2))
            self.encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
            self.head = nn.Linear(16, 32, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            x = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.head(self.encoder(x)).flatten(0, 1)

    class Residual(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
            self.conv2 = nn.Conv2d(width, width, 3, padding=1)
            self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            out = self.relu(self.bn1(self.conv1(x)))
            out = self.bn2(self.conv2(out))
            out += x
            return self.relu(out)

    class ResNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(1, 8, 3, padding=1)
            self.blocks = nn.Sequential(Residual(8), Residual(8))
            self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 32)

        def forward(self, tokens):
            x = F.one_hot(tokens, 32).to(torch.get_default_dtype())[:, None]
            x = self.pool(self.blocks(self.stem(x)))
            return self.head(x.flatten(1)).repeat_interleave(6, 0)

    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(32, 12)
            self.lstm = nn.LSTM(12, 16, num_layers=2, batch_first=True, dropout=0.1)
            self.gru = nn.GRU(16, 8, bidirectional=True, batch_first=True)
            self.out = nn.Linear(16, 32)

        def forward(self, tokens):
            return self.out(self.gru(self.lstm(self.embedding(tokens))[0])[0]).flatten(0, 1)

    RULES = {
        "Transformer": {
            "blocks.*.attention.qkv": "column-3", "blocks.*.attention.out": "row",
            "blocks.*.mlp.0": "column", "blocks.*.mlp.2": "row", "encoder.self_attn": "heads",
            "encoder.linear1": "column", "encoder.linear2": "row",
            "embedding": "vocabulary", "head": "column", "places": "column",
        },
        "ResNet": {
            "blocks.*.conv1": "channels", "blocks.*.bn1": "channels", "blocks.*.conv2": "row",
            "stem": "channels", "head": "column",
        },
        "Language": {
            "embedding": "vocabulary", "lstm": "column", "gru": "column", "out": "column"
        },
    }
    """
SCRIPT = """
    import sys
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, TensorDataset
    import models
    import paceline

    name, layout, rules, epochs, folder = sys.argv[1:]
    world = paceline.init(seed=3, progress=True)
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)  # so that only wrong results differ
    model = getattr(models, name)()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    layout = paceline.Layout.parse(layout)
    if rules == "rules":
        extents = {"dp": layout.dp, "tp": layout.tp, "zero": layout.zero}
        layout = paceline.Layout(**extents, rules=models.RULES[name])
    model, optimizer = world.distribute(model, optimizer, layout=layout, accumulate=2)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 32, (22, 6), generator=generator)
    data = TensorDataset(tokens, tokens.roll(-1, 1))
    loader = world.shard(DataLoader(data, batch_size=2, shuffle=True), global_batch=4)
    validation = world.shard(DataLoader(data, batch_size=5), every_sample_once=True)
    lines = []
    for epoch in world.epochs(int(epochs), checkpoint=folder):
        meter = world.meter()
        for x, y in world.batches(loader):
            if epoch % 2:
                loss = F.cross_entropy(model(x), y.flatten())
                world.backward(loss)
            else:
                loss = world.forward_backward(model, x, y.flatten(), loss=F.cross_entropy)
            meter.add(loss=loss * len(y), count=len(y))
            world.step(optimizer, clip=0.5)
        checked = world.meter()
        for x, y in world.batches(validation):
            out = model(x)
            assert type(out) is torch.Tensor
            checked.add(loss=F.cross_entropy(out, y.flatten(), reduction="sum"), count=y.numel())
        lines.append([meter.ratio("loss", "count"), checked.ratio("loss", "count")])
    if world.rank == 0:
        torch.save(lines, f"{folder}/lines.pt")
        print("RULES", dict(world.layouts[0].rules), flush=True)
    """


@pytest.fixture
def script(tmp_path):
    ranks.write(tmp_path, MODELS, "models.py")
    return ranks.write(tmp_path, SCRIPT)


def saved(folder):
    from paceline.checkpoint.checkpoint_folder import list_checkpoints
    from paceline.checkpoint.saver import load_checkpoint
    from paceline.checkpoint.sharded_tensor import whole

    shared, _, _ = load_checkpoint(list_checkpoints(folder)[0])
    weights = {f"model {name}": whole(tensor) for name, tensor in shared["models"][0].items()}
    for number, of in shared["optimizers"][0]["state"].items():
        weights |= {
            f"state {number}": whole(of["exp_avg"]),
            f"square {number}": whole(of["exp_avg_sq"]),
        }
    return weights


def check_equal(found, expected):
    lines = [
        torch.tensor(torch.load(one / "lines.pt"), dtype=torch.float64) for one in (found, expected)
    ]
    torch.testing.assert_close(*lines, rtol=1e-9, atol=0)
    ours, theirs = saved(found), saved(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-7, atol=1e-9, msg=name)


LAYOUTS = (("tp2", "none", 2), ("dp2 x tp2", "rules", 4), ("dp2 x zero3 x tp2", "none", 4))


@pytest.mark.long
@pytest.mark.parametrize("name", ["Transformer", "ResNet", "Language"])
def test_training_equals_one_process_for_each_data_rank(script, name):
    """Dropout and batch norm included: of data ranks, they are those of data parallel training."""
    folder = script.parent
    ranks.run(script, name, "data", "none", 2, folder / "1", ranks=1, launcher="python")
    ranks.run(script, name, "data", "none", 2, folder / "2", ranks=2)
    for layout, rules, count in LAYOUTS:
        out = folder / f"{layout}-{rules}".replace(" ", "")
        done = ranks.run(script, name, layout, rules, 2, out, ranks=count)
        assert "operations compared with the whole ones" in done.stderr
        check_equal(out, folder / ("2" if "dp2" in layout else "1"))
