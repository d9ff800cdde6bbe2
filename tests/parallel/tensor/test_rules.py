"""Rules for modules: those of the user, and those that are found."""

import pytest
import thread_ranks
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from paceline import divide_dims
from paceline.optim import LAMB
from paceline.parallel.optimizer_check import check_steps_of_pieces
from paceline.parallel.tensor.layer_rules import find_rules, kinds_from_rules
from paceline.parallel.tensor.strategy import patterns_of


class Attention(nn.Module):
    """Its projections have names of their own, and fewer heads for keys and values."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.last = nn.Linear(8, 8)
        self.calls = []

    def forward(self, x):
        self.calls.append(x)  # what the code keeps does not stay
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, 2).transpose(1, 2)
            for layer in (self.a, self.b, self.c)
        )
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return x + self.last(out.transpose(1, 2).reshape(batch, length, -1))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Branching(nn.Module):
    """Code that can't be followed without values."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.second = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)

    def forward(self, x):
        return self.second(self.act(self.first(x))) if x.sum() > 0 else x


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Conv2d(3, 8, 1)
        self.norm = nn.BatchNorm2d(8)
        self.depth = nn.Conv2d(8, 8, 3, groups=8)
        self.narrow = nn.Conv2d(8, 4, 1)
        self.classes = nn.Linear(4 * 4, 6)

    def forward(self, x):
        x = self.narrow(F.relu(self.depth(self.norm(self.wide(x)))))
        return self.classes(torch.flatten(x, 1))


def test_layers_that_follow_each_other_are_found():
    assert find_rules(nn.Sequential(Attention(), Gated(), Branching()), 2).kinds == {
        "0.a": "column",
        "0.b": "column",
        "0.c": "column",
        "0.last": "row",
        "1.up": "column",
        "1.gate": "column",
        "1.down": "row",
        "2.first": "column",
        "2.second": "row",
    }
    model = Attention()
    find_rules(nn.Sequential(model), 2)
    assert model.calls == []
    assert find_rules(Convolutions(), 2).kinds == {
        "wide": "channels",
        "norm": "channels",
        "depth": "channels",
        "narrow": "row",
        "classes": "column",
    }
    found = find_rules(nn.TransformerDecoderLayer(8, 2, 16), 2).kinds
    assert found == {
        "self_attn": "heads",
        "multihead_attn": "heads",
        "linear1": "column",
        "linear2": "row",
    }


def test_a_norm_of_whole_rows_is_no_pair():
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.Linear(400, 400))
    assert find_rules(model, 2).kinds == {"3": "column"}


def test_what_can_not_be_divided_is_replicated_and_said():
    found = find_rules(nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 8)), 2)
    assert found.kinds == {"2": "column"}
    assert (
        "its 9 output features can't be divided by 2 ranks (nearest: 8 or 10)" in found.reasons["0"]
    )
    found = find_rules(nn.TransformerEncoderLayer(9, 3, 16), 2)
    assert "its 3 heads can't be divided by 2 ranks (nearest: 2 or 4)" in found.reasons["self_attn"]


def test_tied_weights_are_divided_alike():
    class Tied(nn.Module):
        def __init__(self, rows):
            super().__init__()
            self.embedding, self.head = nn.Embedding(rows, 4), nn.Linear(4, rows, bias=False)
            self.head.weight = self.embedding.weight

    assert find_rules(Tied(8), 2).kinds == {"embedding": "vocabulary", "head": "column"}
    assert find_rules(Tied(9), 2).kinds == {}


MODEL = nn.ModuleDict(
    {
        "layers": nn.ModuleList([nn.Linear(8, 6), nn.Linear(6, 8)]),
        "attention": nn.MultiheadAttention(9, 3),
        "norm": nn.LayerNorm(8),
        "conv": nn.Conv2d(4, 6, 3, groups=2),
        "bag": nn.Embedding(10, 4, max_norm=1.0),
    }
)


def test_a_whole_name_is_preferred_to_a_pattern():
    rules = [("layers.*", "column"), ("layers.1", "replicate")]
    assert kinds_from_rules(MODEL, rules, 2) == {"layers.0": "column"}
    assert kinds_from_rules(MODEL, rules[::-1], 2) == {"layers.0": "column"}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"layer.0": "column"}, "'layer.0' matches no module. HINT: 'layers.0'"),
        ({"layers.0": "colum"}, "has the kind 'colum'; .* HINT: 'layers.0': 'column'"),
        ({"layers.0": "sequence"}, "a Linear, which has no kind 'sequence'. HINT: 'column' or"),
        ({"layers.0": "heads"}, "a Linear, which has no kind 'heads'. HINT: 'column' or 'row' or"),
        ({"norm": "column"}, "a LayerNorm, which has no kind 'column'. HINT: 'sequence' or"),
        (
            {"*.1": "column", "layers.1*": "row"},
            r"layers.1 matches '\*.1' \(column\) and 'layers.1\*' \(row\). HINT: a rule with its",
        ),
        ({"attention": "heads"}, r"its 3 heads can't be divided by 4 ranks \(nearest: 4\). HINT: "),
        (
            {"layers.0": "column"},
            r"6 output features can't be divided by 4 ranks \(nearest: 4 or 8",
        ),
        (
            {"layers.1": "column-3"},
            r"its 8 output features in 3 blocks can't .* 4 ranks \(nearest: 12",
        ),
        ({"conv": "channels"}, r"its 2 groups can't be divided by 4 ranks"),
        ({"conv": "row"}, "it has groups: 'channels' divides them"),
        ({"bag": "vocabulary"}, "it has max_norm, which changes the weight in forward"),
    ],
)
def test_wrong_rules(rules, message):
    with pytest.raises(ValueError, match=f"^world.distribute: rules: .*{message}"):
        kinds_from_rules(MODEL, list(rules.items()), 4)


DIMS = {
    "layers.0": "hidden width",
    "layers.1": "width hidden",
    "attention": "heads",
    "conv": "out in",
    "bag": "words features",
}


def test_named_dims_on_the_tensor_axis_are_rules():
    rules = divide_dims(MODEL, DIMS, "batch:data; hidden:tensor; heads:tensor")
    assert rules == {"layers.0": "column", "layers.1": "row", "attention": "heads"}
    assert divide_dims(MODEL, DIMS, "width:tp, features:tp") == {
        "layers.0": "row",
        "layers.1": "column",
        "bag": "column",
    }
    assert divide_dims(MODEL, DIMS, "out:tensor") == {"conv": "channels"}
    blocks = {"layers.0": "3*head width", "layers.1": "width _"}
    assert divide_dims(MODEL, blocks, "head:tensor") == {"layers.0": "column-3"}


def test_a_whole_name_is_preferred_to_a_pattern_of_dims():
    dims = {"layers.0": "hidden width", "layers.*": "a b"}
    assert divide_dims(MODEL, dims, "a:tensor") == {"layers.1": "column"}
    assert divide_dims(MODEL, dims, "hidden:tensor") == {"layers.0": "column"}
    with pytest.raises(ValueError, match=r"layers.0 matches 'layers.*' .a b. and '.*0' .c d."):
        divide_dims(MODEL, {"layers.*": "a b", "*0": "c d"}, "a:tensor")
    norms = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with pytest.raises(ValueError, match="'1' matches only LayerNorm, without dims that can be"):
        divide_dims(norms, {"1": "width"}, "width:tensor")


@pytest.mark.parametrize(
    ("dims", "axes", "message"),
    [
        (DIMS, "hiden:tensor", "no weight has a dim 'hiden'. HINT: hidden:tensor"),
        (DIMS, "hidden:tensors", "'hidden:tensors' names no dim and axis. HINT: hidden:tensor"),
        (DIMS, "hidden:data", "'hidden' can't lie on the axis data. HINT: hidden:tensor"),
        (DIMS, "batch:tensor", "'batch' can't lie on the axis tensor. HINT: batch:data"),
        (DIMS, "hidden:tensor, width:tensor", "layers.0 has two divided dims, hidden and width"),
        (DIMS | {"layers.1": "hidden width"}, "hidden:tensor", "'hidden' has 6 elements in layers"),
        ({"layer.0": "a b"}, "a:tensor", "'layer.0' matches no layer. HINT: 'layers.0'"),
        ({"layers.0": "a b c"}, "a:tensor", "layers.0 is a Linear, .* 3 names are too many"),
        ({"layers.0": "a-b"}, "a:tensor", "'a-b' is no name of a dim. HINT: 'hidden width'"),
        ({"conv": "a b k"}, "k:tensor", "dim 2 .'k'. of conv can't be divided"),
    ],
)
def test_wrong_dims(dims, axes, message):
    with pytest.raises(ValueError, match=f"^paceline.divide_dims: .*{message}"):
        divide_dims(MODEL, dims, axes)


def test_statistics_of_all_ranks_are_refused():
    """They would be those of each sample twice, which changes the running variance."""

    def distribute(world):
        world.distribute(nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8)), layout="tp2")

    for error in thread_ranks.run(distribute, 2, outcomes=True):
        assert "1 is a SyncBatchNorm, which would count" in str(error)


def test_names_become_patterns():
    kinds = {"h.0.a": "row", "h.1.a": "row", "h.0.b": "row", "h.1.b": "column", "x2": "row"}
    assert patterns_of(kinds) == {"h.*.a": "row", "h.0.b": "row", "h.1.b": "column", "x2": "row"}


def test_optimizers_of_single_elements():
    weight = nn.Parameter(torch.ones(4, 4))
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
        optimizer = kind([weight], lr=0.1)
        before = str(optimizer.state_dict())
        check_steps_of_pieces(optimizer)
        assert str(optimizer.state_dict()) == before
    check_steps_of_pieces(LAMB([weight], lr=0.1))

    class Derived(LAMB):
        pass

    for optimizer in (
        torch.optim.Adafactor([weight]),
        Derived([weight], lr=0.1),
        torch.optim.LBFGS([weight]),
    ):
        with pytest.raises(ValueError, match=r"can't train a model that is divided .*HINT: an opt"):
            check_steps_of_pieces(optimizer)
    assert torch.equal(weight, torch.ones(4, 4))
