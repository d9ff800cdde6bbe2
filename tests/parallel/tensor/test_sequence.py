"""Norms and dropout on parts of the tokens: equal to one process, with another exchange."""

from unittest import mock

import pytest
import thread_ranks
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from paceline import Layout
from paceline.parallel.tensor import strategy
from paceline.parallel.tensor.exchange import TensorAxis


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.RMSNorm(8)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.3)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (one(h).unflatten(-1, (4, 2)).transpose(1, 2) for one in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(h))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.places = nn.Embedding(12, 8), nn.Embedding(6, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.encoder = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 12)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.encoder(x))).flatten(0, 1)


WIDTH = 8  # of tokens
RULES = {
    "embedding": "vocabulary",
    "blocks.*.[qkv]": "column",
    "blocks.*.out": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "encoder.self_attn": "heads",
    "encoder.linear1": "column",
    "encoder.linear2": "row",
    "head": "column",
}
SEQUENCE = {"*norm*": "sequence", "*drop*": "sequence"}


def train(tokens, world=None, layout=None):
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if world is not None:
        model, optimizer = world.distribute(model, optimizer, layout=layout)
    found = []
    for step in range(3):
        torch.manual_seed(7 + step)
        loss = F.cross_entropy(model(tokens), tokens.roll(-1, 1).flatten())
        if world is None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            world.backward(loss)
            world.step(optimizer)
        found.append(float(loss.detach()))
    return found, {n: p.detach().clone() for n, p in model.named_parameters() if "norm" in n}


def run(tokens, rules, ranks):
    """Check equality; return how many sums of [batch, tokens, features] all ranks got whole."""
    expected, norms = train(tokens)
    plain, whole = TensorAxis.sum, []

    def note(axis, tensor):
        whole.append(tensor.numel() == tokens.numel() * WIDTH)
        return plain(axis, tensor)

    layout = Layout(tp=ranks, rules=rules)
    with mock.patch.object(TensorAxis, "sum", note):
        every = thread_ranks.run(lambda world: train(tokens, world, layout), ranks)
    for found, own in every:
        assert found == pytest.approx(expected, rel=1e-5)
        for name, value in own.items():
            torch.testing.assert_close(value, norms[name], rtol=1e-4, atol=1e-5, msg=name)
    return sum(whole)


@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_are_divided_between_pairs_of_layers(ranks):
    tokens = torch.randint(0, 12, (4, 4), generator=torch.Generator().manual_seed(1))
    assert run(tokens, RULES | SEQUENCE, ranks) == 0
    if ranks == 2:
        assert run(tokens, RULES, ranks) > 0


def test_tokens_that_can_not_be_divided_are_whole_and_said(capsys):
    tokens = torch.randint(0, 12, (4, 5), generator=torch.Generator().manual_seed(1))
    expected, _ = train(tokens)
    said = []

    def on_rank(world):
        world._progress.say = said.append
        return train(tokens, world, Layout(tp=2, rules=RULES | SEQUENCE))[0]

    for found in thread_ranks.run(on_rank, 2):
        assert found == pytest.approx(expected, rel=1e-5)
    line = next(one for one in said if "blocks.0.norm1 ('sequence')" in one)
    assert "gets the shape (4, 5, 8), whose dim 1 can't be divided by 2 ranks" in line
    assert "HINT: sequences padded to a multiple of 2" in line


def test_tensors_without_tokens_are_whole_and_said():
    said = []

    def on_rank(world):
        world._progress.say = said.append
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4))
        rules = {"0": "column", "1": "row", "2": "sequence"}
        model = world.distribute(model, layout=Layout(tp=2, rules=rules))
        return model(torch.randn(4, 4))

    thread_ranks.run(on_rank, 2)
    line = next(one for one in said if "2 ('sequence')" in one)
    assert "gets the shape (4, 4), which is not [batch, tokens, features]" in line
    assert "HINT: rules without 'sequence' for '2'" in line


def test_the_knob_divides_the_tokens_of_models_without_such_rules(monkeypatch):
    turned = mock.Mock()
    monkeypatch.setattr(strategy._Requested, "turned", turned)
    tokens = torch.randint(0, 12, (4, 4), generator=torch.Generator().manual_seed(1))
    assert run(tokens, RULES, 2) == 0
    assert turned.done.called
    turned.reset_mock()
    assert strategy.requested_modules(torch.nn.Sequential(torch.nn.Linear(2, 2)), {}) == {}
    assert not turned.done.called
    assert "no norms" in turned.not_done.call_args.args[0]


@pytest.mark.parametrize(
    ("layout", "word"),
    [
        (Layout(tp=2, zero=3, rules=RULES | SEQUENCE), "zero3"),
        (Layout(dp=1, tp=2, pp=2, rules=RULES | SEQUENCE), "pp"),
    ],
)
def test_sharded_layouts_and_pipelines_are_refused(layout, word):
    tokens = torch.zeros(4, 4, dtype=torch.int64)
    ranks = layout.tp * layout.pp
    for error in thread_ranks.run(lambda world: train(tokens, world, layout), ranks, outcomes=True):
        assert f"'sequence' together with {word} is not implemented" in str(error)
        assert f"HINT: a layout without {word}" in str(error)
