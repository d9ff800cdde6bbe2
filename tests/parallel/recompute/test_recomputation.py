"""Recomputation gives the numbers of the plain model, and auto stays within its budget."""

import copy
import itertools
import random

import pytest
import torch
from torch import nn

from fake_gpu import fake_gpu
from paceline.parallel import memory_budget
from paceline.parallel.blocks import recomputed_blocks
from paceline.parallel.recompute import recomputation
from paceline.parallel.recompute.recomputation import (
    ReplayedBuffers,
    Way,
    choose_ways,
    least_bytes,
    peak_bytes,
    recompute_blocks,
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.BatchNorm1d(16)
        self.attention = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        self.drop = nn.Dropout(0.3)

    def forward(self, x, *, scale, twice=False):
        y = self.drop(torch.nn.functional.gelu(self.a(x)))
        y = self.norm(x + self.b(y) * scale) + self.attention(x)
        return y, (y * 2 if twice else y)


class Net(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            one, two = layer(x, scale=0.5, twice=True)
            x = one + two
        return self.last(x)


def steps(model, dtype, count=2):
    torch.manual_seed(3)
    found = []
    for _ in range(count):
        model.zero_grad()
        for _ in range(2):  # accumulation
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
                loss = model(torch.randn(32, 8)).float().square().mean()
            loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((loss.detach(), gradients))
    return found, dict(model.named_buffers()), torch.get_rng_state()


BUDGETS = [0.00004, 0.00006, 0.0001, 1.0]  # GiB


OPTIONS = [("blocks", None), ("selective", None), *(("auto", gib) for gib in BUDGETS)]
QUICK = {"fp32": [("blocks", None), ("auto", BUDGETS[1])], "bf16": [("selective", None)]}


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        pytest.param(one, dtype, marks=() if one in quick else pytest.mark.long)
        for dtype, quick in QUICK.items()
        for one in OPTIONS
    ],
)
def test_recomputation_equals_plain_model_bit_for_bit(options, dtype):
    torch.manual_seed(0)
    plain = Net()
    plain.layers[1].requires_grad_(False)
    model = copy.deepcopy(plain)
    recompute_blocks(model, *options, None, lambda _: None)
    expected, buffers, state = steps(plain, dtype)
    found, found_buffers, found_state = steps(model, dtype)
    assert torch.equal(state, found_state)
    assert all(torch.equal(buffers[name], found_buffers[name]) for name in buffers)
    for (loss, gradients), (found_loss, found_gradients) in zip(expected, found, strict=True):
        assert torch.equal(loss, found_loss)
        assert gradients.keys() == found_gradients.keys()
        assert all(torch.equal(gradients[name], found_gradients[name]) for name in gradients)


def kept_bytes(model):
    """Return the bytes that autograd keeps outside of checkpoints, except parameters."""
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.randn(512, 8)).sum()
    total = sum(s.nbytes() for key, s in kept.items() if key not in parameters)
    loss.backward()
    return total


def test_blocks_keep_less_than_a_third_of_activations():
    plain, model = Net(), Net()
    recompute_blocks(model, "blocks", None, None, lambda _: None)
    assert kept_bytes(model) < kept_bytes(plain) / 3


def test_in_place_activation_is_recomputed_with_selective():
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))  # noqa: E731
    plain = nn.Sequential(*(block() for _ in range(3)))
    model = copy.deepcopy(plain)
    recompute_blocks(model, "selective", None, ["0", "1", "2"], lambda _: None)
    for one in (plain, model):
        one(torch.ones(2, 8)).square().sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_budget_that_nothing_meets_names_the_least():
    model = Net()
    recompute_blocks(model, "auto", 1e-6, None, lambda _: None)
    with pytest.raises(
        ValueError, match=r"below what .* 4 blocks .* GiB. HINT: memory_budget="
    ) as e:
        model(torch.randn(32, 8))
    enough = float(str(e.value).rpartition("memory_budget=")[2].partition(",")[0])
    model = Net()
    recompute_blocks(model, "auto", enough, None, lambda _: None)
    model(torch.randn(32, 8)).sum().backward()


def test_choice_is_said_and_no_block_is_said():
    said = []
    recompute_blocks(nn.Linear(2, 2), "blocks", None, None, said.append)
    assert "has no effect: the Linear has no repeated blocks. HINT" in said.pop()
    model = Net()
    recompute_blocks(model, "auto", 1.0, None, said.append)
    model(torch.randn(32, 8))
    assert said == ["recompute='auto': activations of 4 blocks: 4 kept"]


@pytest.mark.parametrize(
    ("free", "ranks", "choice"),
    [(1 << 40, 2, "4 kept;"), (1 << 20, 4, " recomputed")],
)
def test_default_budget_is_what_the_ranks_of_the_node_leave(monkeypatch, free, ranks, choice):
    said = []
    monkeypatch.setattr(memory_budget, "free_memory", lambda: free)
    for name, value in {"RANK": 0, "WORLD_SIZE": 8, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    model = Net()
    recompute_blocks(model, "auto", None, None, said.append)
    model(torch.randn(512, 8)).sum().backward()
    assert choice in said[0]
    states = 3 * sum(parameter.nbytes for parameter in model.parameters())
    expected = 0.8 * (free // ranks - states) / (1 << 30)
    assert f"{expected:.4g} GiB of the rank's memory are available" in said[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("all", None), "recompute must be"),
        (("blocks", 1.0), "has no effect with recompute='blocks'"),
        (("auto", -1.0), "above 0 GiB; this is -1.0"),
    ],
)
def test_invalid_options_are_rejected(options, text):
    with pytest.raises(ValueError, match=text + r".*HINT: "):
        recompute_blocks(Net(), *options, None, lambda _: None)


def test_choice_equals_exhaustive_search():
    draw = random.Random(5)
    for _ in range(30):
        blocks = []
        for _ in range(6):
            total, part, kept = (draw.randint(*r) for r in ((500, 900), (200, 400), (20, 90)))
            cost = draw.random()
            names = ("keep", total, 0, 0.0), ("blocks", kept, total, cost)
            blocks.append([*(Way(*w) for w in names), Way("selective", part, total, cost / 3)])
        every = list(itertools.product(*blocks))
        least = min(map(peak_bytes, every))
        assert least_bytes(blocks) == least
        assert choose_ways(blocks, least - 1) is None
        for budget in (least, least * 3 // 2, least * 2, least * 4):
            best = min(sum(w.cost for w in ws) for ws in every if peak_bytes(ws) <= budget)
            assert choose_ways(blocks, budget).cost == pytest.approx(best)


def test_blocks_are_repeated_or_named_modules():
    net = Net(2)
    assert [name for name, _ in recomputed_blocks(net)] == ["layers.0", "layers.1"]
    assert [name for name, _ in recomputed_blocks(net, ["layers", "last"])] == [
        *("layers.0", "layers.1", "last")
    ]
    assert [name for name, _ in recomputed_blocks(net, ["Block"])] == ["layers.0", "layers.1"]
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert recomputed_blocks(plain) == []
    with pytest.raises(ValueError, match=r"'layer.0'.*HINT: recomputed_blocks=\['layers.0'\]"):
        recomputed_blocks(net, ["layer.0"])


def test_buffers_of_a_gpu_are_not_compared_in_forward(monkeypatch):
    """The comparison would wait for the device in each block."""
    with fake_gpu(monkeypatch):
        ReplayedBuffers(nn.BatchNorm1d(4, device="cuda:0")).forget_unchanged()


def test_times_are_those_of_the_device_where_inputs_are_on_both():
    mask, hidden = torch.ones(1), torch.ones(1, device="meta")
    assert recomputation._device_of(((mask, hidden), {})) == torch.device("meta")
    assert recomputation._device_of(((mask,), {})) == torch.device("cpu")
