"""Which modules of a model are gathered together, and which recompute their activations."""

import pytest
from torch import nn

from paceline.parallel.blocks import gathered_blocks, recomputed_blocks


def transformer():
    made = nn.Module()
    made.table = nn.Embedding(10, 4)
    made.layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 1, 8) for _ in range(3))
    made.last = nn.Linear(4, 10)
    return made


def test_repeated_modules_are_blocks():
    assert gathered_blocks(transformer(), None) == ["layers.0", "layers.1", "layers.2"]


def test_large_modules_are_blocks_and_small_ones_belong_to_the_model():
    big, small = nn.Linear(1000, 1000), nn.Linear(2, 2)
    made = nn.Sequential(small, nn.Sequential(big, nn.ReLU()), nn.Linear(1000, 1000))
    assert gathered_blocks(made, None) == ["1.0", "2"]
    assert gathered_blocks(nn.Sequential(small, nn.ReLU()), None) == []


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["layers"], ["layers.0", "layers.1", "layers.2"]),
        (["TransformerEncoderLayer"], ["layers.0", "layers.1", "layers.2"]),
        (["layers.1", "table"], ["layers.1", "table"]),
        ("last", ["last"]),
        ([], []),
    ],
)
def test_named_blocks(names, found):
    assert gathered_blocks(transformer(), names) == found


def test_inner_blocks_come_before_those_around_them():
    names = ["layers.0", "layers.0.linear1"]
    assert gathered_blocks(transformer(), names) == ["layers.0.linear1", "layers.0"]


def test_module_with_tied_weights_is_no_block():
    made = transformer()
    made.last.weight = made.table.weight
    assert gathered_blocks(made, ["last", "layers.0"]) == ["layers.0"]


def test_unknown_name_is_an_error_with_the_nearest():
    with pytest.raises(
        ValueError, match=r"'layer\.1', and no module.*HINT: blocks=\['layers\.1'\]"
    ):
        gathered_blocks(transformer(), ["layer.1"])


class Twice(nn.Module):
    """The same block twice as attributes, and Sequentials in a list."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.TransformerEncoderLayer(4, 1, 8) for _ in range(2))
        self.others = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))


def test_gathered_and_recomputed_blocks_differ_as_the_module_says():
    made = Twice()
    assert [name for name, _ in recomputed_blocks(made)] == ["first", "second"]
    assert gathered_blocks(made, None) == ["others.0", "others.1"]
    made = transformer()
    assert [name for name, _ in recomputed_blocks(made)] == gathered_blocks(made, None)
