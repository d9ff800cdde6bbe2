"""Layers that compute with parts of a sample equal those of the whole sample, or are refused."""

import json
from pathlib import Path

import pytest
import ranks
import spatial_cases

REFUSED = """
    import json, sys
    import numpy as np
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint
    import paceline

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2
        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()
        @staticmethod
        def backward(ctx, gradient):
            return torch.ones(2, 3, 6, 4)

    class Layer(nn.Module):
        def __init__(self, call):
            super().__init__()
            self.call, self.weight = call, nn.Parameter(torch.ones(()))
        def forward(self, x):
            return self.call(x * self.weight)

    class Net(nn.Module):
        def __init__(self, call):
            super().__init__()
            self.layer = Layer(call)
        def forward(self, x):
            return self.layer(x) + 0

    CALLS = {
        "roll": lambda x: x.roll(1, 2),
        "flip of two dims": lambda x: x.flip(1, 2),
        "cumsum": lambda x: x.cumsum(2),
        "softmax of positions": lambda x: x.softmax(2),
        "sort": lambda x: x.sort(2)[0],
        "autograd function": lambda x: Double.apply(x),
        "reentrant checkpoint": lambda x: checkpoint(torch.tanh, x, use_reentrant=True),
        "an index": lambda x: x[:, :, 1],
        "a step": lambda x: x[:, :, ::2],
        "a mask": lambda x: x[x > 0],
        "assignment": lambda x: x.__setitem__((0, 0, slice(2)), 0),
        "where of one argument": lambda x: torch.where(x > 0)[0],
        "cat along height": lambda x: torch.cat([x, x], 2),
        "indices of max pooling": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
        "antialias": lambda x: F.interpolate(x, size=3, mode="bilinear", antialias=True),
        "norm": lambda x: x.norm(),
        "median": lambda x: x.median(),
        "layer norm of positions": lambda x: F.layer_norm(x, x.shape[1:]),
        "grid_sample": lambda x: F.grid_sample(x, torch.zeros(2, 3, 3, 2)),
        "unfold": lambda x: F.unfold(x, 3),
        "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
        "tolist": lambda x: x.detach().tolist(),
        "convolution by the sample": lambda x: F.conv2d(torch.ones(2, 3, 6, 4), x),
        "weighted mean": lambda x: F.mse_loss(x, torch.zeros(2, 3, 6, 4), weight=x),
        "a gathered view in place": lambda x: x.view(2, -1).mul_(3),
        "a hook": lambda x: (x.register_hook(lambda g: g * 2), x)[1],
        "a part as the whole": lambda x: x * getattr(x, "local", x).mean(),
        "a loss": lambda x: Loss.apply(x.softmax(1)).backward(),
    }
    world = paceline.init(progress=False)
    found, x = {}, torch.randn(2, 3, 6, 4, generator=torch.Generator().manual_seed(0))
    for name, call in CALLS.items():
        model = world.distribute(Net(call), layout="h2")
        try:
            found[name] = f"no error: {model(x)}"
        except (ValueError, TypeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    rules = paceline.Layout(h=2, rules={"layer": "gather"})
    gathered = world.distribute(Net(lambda x: x.roll(1, 2)), layout=rules)
    found["rule"] = torch.equal(gathered(x), x.roll(1, 2))
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ConvTranspose2d(4, 2, 2, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layers(x)
        close = world.whole(world.distribute(layers, layout="h2")(x))
    found["bf16"] = close.dtype == torch.bfloat16 and torch.allclose(close, expected, 0.02, 0.02)
    attend = F.scaled_dot_product_attention
    mask = torch.ones(6, 6).tril() > 0
    memory = torch.arange(120.0).view(2, 3, 5, 4) / 100
    torch.manual_seed(0)
    heads = nn.MultiheadAttention(4, 2, batch_first=True)
    FORMS = {
        "fft of positions": lambda x: torch.fft.fft2(x, norm="ortho").real + x,
        "fft of a divided dim": lambda x: torch.fft.rfft(x, dim=2).abs(),
        "fft of a whole dim": lambda x: torch.fft.fft(x, None, 3).imag * x,
        "convolution of a spectrum": lambda x: F.conv2d(
            torch.fft.fft2(x).real, torch.ones(2, 3, 3, 3), padding=1
        ),
        "spectral layer": lambda x: torch.fft.irfft2(
            torch.einsum("bixy,io->boxy", torch.fft.rfft2(x)[:, :, :2, :2], torch.ones(3, 2) + 2j),
            s=(6, 4),
        ),
        "loss of tokens": lambda x: F.cross_entropy(
            x.flatten(2), (x.sum(1) > 0).long().flatten(1), reduction="none"
        ),
        "loss of rows": lambda x: F.cross_entropy(
            x[:1].movedim(1, 3).reshape(-1, 3), (x[:1].sum(1) > 0).long().reshape(-1)
        ),
        "pooled spectrum": lambda x: F.adaptive_avg_pool2d(torch.fft.rfft2(x).imag, 2),
        "sorted spectrum": lambda x: torch.fft.fft2(x).abs().sort(1)[0].roll(1, 2),
        "inverse of all": lambda x: torch.fft.irfftn(torch.fft.rfftn(x) * 2),
        "fft of sizes": lambda x: torch.fft.rfftn(x, (8, 4)).abs(),
        "attention": lambda x: attend(x, x * 2, x.sin()),
        "attention to a memory": lambda x: attend(x, memory, memory.cos()),
        "queries from elsewhere": lambda x: attend(memory, x, x),
        "causal attention": lambda x: attend(x, x, x, is_causal=True),
        "attention with a mask": lambda x: attend(x, x, x, mask),
        "heads": lambda x: heads(x[:, 0], x[:, 1], x[:, 2])[0],
        "matmul": lambda x: x @ x.transpose(2, 3) @ torch.ones(6, 3),
        "matmul of a vector": lambda x: x @ torch.ones(4) + torch.ones(6) @ x @ torch.ones(4, 6),
        "summed product": lambda x: x.transpose(2, 3) @ x,
        "einsum": lambda x: torch.einsum("nchw,nchv->nwv", x, x),
        "broadcast einsum": lambda x: torch.einsum("nchw,ho->ncwo", x, torch.ones(1, 2)),
        "linear over rows": lambda x: F.linear(x.transpose(2, 3), torch.ones(5, 6), torch.ones(5)),
        "merged rows": lambda x: x.flatten(2).sort(1)[0].view(2, 3, 6, 4).roll(1, 2),
        "squeezed": lambda x: x.mean(1, keepdim=True).squeeze() + x[:, 0].unsqueeze(1).squeeze(1),
        "transposed": lambda x: x[:, :, :4] + x[:, :, :4].transpose(2, 3),
        "cat of transposed": lambda x: torch.cat([x[:, :, :4], x[:, :, :4].transpose(2, 3)], 1),
        "zeros in place": lambda x: (x := x * 1, x[:, :, :2].zero_(), x)[2],
        "assignment": lambda x: (x := x * 1, x.__setitem__((0, 1), x[1, 2]), x)[2],
        "assignment of a number": lambda x: (x := x * 1, x.__setitem__((..., 1), 2), x)[2],
        "narrow in place": lambda x: (x := x * 1, x.narrow(2, 0, 2).mul_(3), x)[2],
        "var, unbiased, keepdim": lambda x: x / (x.var((2, 3), True, True) + 1),
        "var of channels": lambda x: x.var(1, True),
        "keepdims": lambda x: x - x.mean(axis=(2, 3), keepdims=True) - x.sum(1, keepdims=True),
        "axis of stack": lambda x: torch.stack([x, x * 2], axis=1).mean(1),
        "axis of cat": lambda x: torch.cat([x, x * 2], axis=1),
        "to": lambda x: x * torch.arange(4).to(x),
        "type_as": lambda x: x * torch.tensor([2]).type_as(x),
        "keywords": lambda x: F.softmax(input=x.narrow(dim=2, start=1, length=4), dim=1),
        "index of NumPy": lambda x: x[:, np.int64(1)],
        "mean of halves": lambda x: (x * 0 + 4000).half().repeat(1, 40, 1, 1).mean((1, 2, 3)),
        "dropped channels of no rows": lambda x: F.dropout2d(F.max_pool2d(x, (6, 1)), 0.5),
    }
    wrong, weights = [], torch.randn(2, 400, 6, 4, generator=torch.Generator().manual_seed(3))
    for name, call in FORMS.items():
        plain, values, draws = Net(call), [], []
        for one in (plain, world.distribute(Net(call), layout="h2")):
            torch.manual_seed(5)
            out = world.whole(one(x)).float()
            draws.append(torch.rand(1).item())
            loss = (out.flatten() * weights.flatten()[: out.numel()]).sum()
            one.zero_grad()
            loss.backward()
            gradient = next(one.parameters()).grad
            values.append(torch.cat([out.flatten(), gradient.reshape(1)]))
        if values[0].shape != values[1].shape or not torch.allclose(*values, 1e-4, 1e-5):
            wrong.append(f"{name}: {values}")
        if draws[0] != draws[1]:
            wrong.append(f"{name} draws {draws}")
    found["forms"] = wrong
    for text, value in (
        ("other samples", x + world.rank), ("other shapes", x[: world.rank + 1]),
        ("few rows", torch.zeros(1, 1, 1, 5)), ("no height", torch.zeros(1, 2, 9)),
        ("gradient", torch.zeros(1, 1, 4, 4, requires_grad=True)),
    ):
        try:
            found[text] = f"no error: {gathered(value)}"
        except ValueError as error:
            found[text] = f"{type(error).__name__}: {error}"
    for text, options in (
        ("shards", {"layout": "zero3/2 x h2"}), ("unused", {"find_unused_parameters": True}),
        ("kind", {"layout": paceline.Layout(h=2, rules={"layer": "column"})}),
        ("pattern", {"layout": paceline.Layout(h=2, rules={"layr": "gather"})}),
    ):
        try:
            found[text] = f"no error: {world.distribute(Net(abs), **{'layout': 'h2', **options})}"
        except ValueError as error:
            found[text] = f"{type(error).__name__}: {error}"
    if world.rank == 0:
        json.dump(found, open(sys.argv[1], "w"))
    """


def run_cases(tmp_path, count, layouts, ranks_count, seed=7, timeout=300):
    out = tmp_path / "found.json"
    script = Path(spatial_cases.__file__)
    given = (count, seed, out, *layouts)
    ranks.run(script, *given, ranks=ranks_count, timeout=timeout)
    return json.loads(out.read_text())


def test_random_layers_equal_the_whole_sample_on_two_ranks(tmp_path):
    found = run_cases(tmp_path, 150, ("w2", "h2", "d2"), 2)
    assert found["wrong"] == []
    assert len(found["refused"]) < 30  # what PyTorch refuses for the whole sample


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "layouts"),
    [
        (3, ("w3", "h3", "d3")),
        (4, ("w4", "h2 x w2", "d2 x h2", "d4", "d2 x dp2")),
        (8, ("d2 x h2 x w2", "h8", "h2 x w4")),
    ],
)
def test_a_thousand_random_layers_equal_the_whole_sample(tmp_path, count, layouts):
    found = run_cases(tmp_path, 1000, layouts, count, timeout=560)
    assert found["wrong"] == []
    assert len(found["refused"]) < 200


def test_what_is_not_known_to_be_right_is_refused_with_the_name_of_its_layer(tmp_path):
    script = ranks.write(tmp_path, REFUSED)
    ranks.run(script, tmp_path / "found.json", ranks=2)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.pop("rule") is True
    assert found.pop("bf16") is True
    assert found.pop("forms") == []
    accepted = {name: text for name, text in found.items() if text.startswith("no error")}
    assert accepted == {}
    unclear = {name: text for name, text in found.items() if "HINT" not in text}
    assert unclear == {}
    for name in ("roll", "sort", "a mask"):
        assert "layer (Layer)" in found[name]
    assert "the model (Net): DoubleBackward" in found["autograd function"]
