"""Small trainings in tensor layouts, on threads: each equals one process, or is refused."""

from collections import deque
from textwrap import dedent
from types import SimpleNamespace

import numpy as np
import pytest
import thread_ranks
import torch
import torch.nn.functional as F  # noqa: N812
from test_tensor_models import MODELS
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline import Layout


class Block(nn.Module):
    def __init__(self, between=None, hidden=24):
        super().__init__()
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)
        self.between = between

    def forward(self, x):
        h = self.up(x)
        return self.down(torch.relu(h if self.between is None else self.between(self, h)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, mask):
        q, k, v = (one(x).unflatten(-1, (4, 2)).transpose(1, 2) for one in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.5)
        return self.out(found.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, block, attention=None):
        super().__init__()
        self.block, self.attention, self.head = block, attention, nn.Linear(8, 4)

    def forward(self, x, mask=None):
        h = self.block(x)
        return self.head(h if self.attention is None else self.attention(h, mask))


RULES = {"block.up": "column", "block.down": "row"}
HEADS = {"attention.[qkv]": "column", "attention.out": "row"}


def losses(make, world=None, layout=None, masks=(None, None, None), penalty=None):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(4, 3, 8), torch.randint(0, 4, (4, 3))
    if world is not None:
        model, optimizer = world.distribute(model, optimizer, layout=layout)
    found = []
    for mask in masks:
        torch.manual_seed(7)
        loss = F.cross_entropy(model(x, mask).flatten(0, 1), y.flatten())
        loss = loss if penalty is None else loss + penalty(model)
        if world is None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            world.backward(loss)
            world.step(optimizer)
        found.append(float(loss.detach()))
    return found


def check(make, layout=None, **options):
    layout = layout or Layout(tp=2, rules=RULES)
    expected = losses(make, **options)
    for found in thread_ranks.run(lambda world: losses(make, world, layout, **options), layout.tp):
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_module_with_several_names_is_divided_under_all_of_them():
    def train(world):
        model = nn.Module()
        model.layers = nn.ModuleList([Block()] * 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rules = {"layers.0.up": "column", "layers.0.down": "row"}
        world.distribute(model, optimizer, layout=Layout(tp=2, rules=rules))
        (known,) = world._training.models
        for name in model.state_dict():
            part = known.part_of(name)
            if name.endswith("down.bias"):
                assert part is None
            else:
                assert part.whole in {(24, 8), (24,), (8, 24)}
                assert known.parted_axes(name) == {"tensor"}

    thread_ranks.run(train)


class Stateful(Net):
    """Code that keeps what it computes in every place where it can be."""

    def __init__(self, kind):
        super().__init__(Block())
        self.kind, self.mean = kind, torch.zeros(())
        self.nested, self.object = {"list": [deque([torch.zeros(())])]}, SimpleNamespace(n=0.0)
        self.array, self.numbers = np.zeros(1), np.random.default_rng(3)
        self.own = torch.Generator().manual_seed(1)

    def forward(self, x, _=None):
        h = self.block(x)
        size = h.detach().pow(2).mean()
        if self.kind == "tensor":
            self.mean = 0.5 * self.mean + size
        elif self.kind == "in place":
            self.mean.mul_(0.5).add_(size)
        elif self.kind == "nested":
            self.nested["list"][0].append(self.nested["list"][0][-1] + 1)
            self.mean = self.nested["list"][0][-1]
        elif self.kind == "object":
            self.object.n += 1
            self.mean = torch.tensor(self.object.n)
        elif self.kind == "new":
            self.calls = getattr(self, "calls", 0) + 1
            self.mean = torch.tensor(float(self.calls))
        elif self.kind == "buffer":
            if not hasattr(self, "made"):
                self.register_buffer("made", size * 0)
            self.made += 1
            self.mean = self.made.clone()
        elif self.kind == "array":
            self.array += 1
            self.mean = torch.tensor(float(self.array[0]))
        elif self.kind == "generators":
            self.mean = torch.rand((), generator=self.own) + self.numbers.random()
        return self.head(h / (1 + self.mean))


@pytest.mark.parametrize(
    "kind",
    ["tensor", "in place", "nested", "object", "new", "buffer", "array", "generators"],
)
def test_the_comparison_leaves_the_state_of_the_model_as_it_was(kind):
    check(lambda: Stateful(kind))


def test_losses_that_the_model_keeps_in_a_list():
    def keep(block, h):
        block.__dict__.setdefault("kept", []).append(h.pow(2).mean())
        return h

    def penalty(model):
        kept = model.block.kept
        found = sum(kept)
        kept.clear()
        return found

    check(lambda: Net(Block(keep)), penalty=penalty)


def test_attention_with_dropout_and_rows_whose_keys_are_all_masked():
    mask = torch.ones(4, 1, 3, 3, dtype=torch.bool).tril()
    padded = mask.clone()
    padded[0, 0, :2] = False
    layout = Layout(tp=2, rules=RULES | HEADS)
    make = lambda: Net(Block(), Attention())  # noqa: E731
    check(make, layout, masks=(mask, padded, padded))
    added = torch.zeros(padded.shape).masked_fill(~padded, float("-inf"))
    check(make, layout, masks=(padded, added, added))


@pytest.mark.parametrize("hidden", [24, 2])  # 2: pieces of extent 1
def test_dropout_of_transposed_parts_has_the_mask_of_one_process(hidden):
    def between(_, h):
        return F.dropout(h.transpose(1, 2), 0.5).transpose(1, 2)

    check(lambda: Net(Block(between, hidden)))


@pytest.mark.parametrize(
    "between",
    [
        lambda _, h: h - h.mean(axis=1, keepdims=True),
        lambda _, h: h.narrow(dim=1, start=0, length=3) * torch.softmax(input=h, dim=1),
        lambda _, h: (
            h + torch.cat(h.chunk(3, axis=1), axis=1).unflatten(dim=-1, sizes=(4, -1)).flatten(-2)
        ),
        lambda _, h: h + F.pad(h, pad=(0, 0, 1, 0))[:, 1:] + h.select(axis=1, index=0)[:, None],
    ],
)
def test_arguments_by_name_and_names_of_numpy(between):
    check(lambda: Net(Block(between)))


def test_a_reentrant_checkpoint_is_refused():
    class Recomputed(Net):
        def forward(self, x, _=None):
            return self.head(checkpoint(self.block, x.requires_grad_(), use_reentrant=True))

    layout = Layout(tp=2, rules=RULES)
    found = thread_ranks.run(
        lambda world: losses(lambda: Recomputed(Block()), world, layout), outcomes=True
    )
    for error in found:
        assert isinstance(error, ValueError)
        assert "HINT: torch.utils.checkpoint.checkpoint(..., use_reentrant=False)" in str(error)


def test_three_ranks():
    check(lambda: Net(Block()), Layout(tp=3, rules=RULES))


# sizes that three ranks divide
FOR_THREE = (("(16, 4", "(24, 3"), ("16", "24"), ("32", "36"), ("8", "12"))


@pytest.mark.parametrize(("ranks", "has_rules"), [(2, True), (2, False), (3, True), (4, False)])
@pytest.mark.parametrize("name", ["Transformer", "ResNet", "Language"])
def test_models_with_and_without_rules(name, ranks, has_rules):
    text, space = dedent(MODELS), {}
    for old, new in FOR_THREE if ranks == 3 else ():
        text = text.replace(old, new)
    exec(text, space)

    def train(world=None):
        torch.manual_seed(5)
        model = space[name]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.randint(0, 32, (4, 6))
        if world is not None:
            layout = Layout(tp=ranks, rules=space["RULES"][name] if has_rules else {})
            model, optimizer = world.distribute(model, optimizer, layout=layout)
        found = []
        for step in range(2):
            torch.manual_seed(step)
            loss = F.cross_entropy(model(tokens), tokens.roll(-1, 1).flatten())
            if world is None:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                world.backward(loss)
                world.step(optimizer)
            found.append(float(loss.detach()))
        return found

    expected = train()
    for found in thread_ranks.run(train, ranks):
        assert found == pytest.approx(expected, rel=1e-5)
