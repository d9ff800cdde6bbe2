"""Batches of several ranks as one, and with their samples in another order."""

import collections

import pytest
import torch

from paceline.record.training.replays.joined_batches import join_batches, permute_batch

Pair = collections.namedtuple("Pair", "x y")


def test_batches_of_different_sizes_are_joined_in_order():
    one = {"x": torch.arange(6).reshape(3, 2), "name": ["a", "b", "c"], "scale": 2.0}
    other = {"x": torch.arange(6, 10).reshape(2, 2), "name": ["d", "e"], "scale": 2.0}
    joined = join_batches([one, other])
    assert torch.equal(joined["x"], torch.arange(10).reshape(5, 2))
    assert joined["name"] == list("abcde")
    assert joined["scale"] == 2.0


def test_type_of_containers_is_kept():
    joined = join_batches([Pair(torch.zeros(2, 3), torch.zeros(2))] * 2)
    assert isinstance(joined, Pair)
    assert joined.x.shape == (4, 3)
    assert isinstance(join_batches([[torch.zeros(2)], [torch.ones(2)]]), list)


@pytest.mark.parametrize(
    "batches",
    [
        [torch.zeros(2, 3), torch.zeros(2, 4)],
        [{"x": torch.zeros(2), "kind": "a"}, {"x": torch.zeros(2), "kind": "b"}],
    ],
)
def test_batches_that_do_not_fit_are_refused(batches):
    with pytest.raises(ValueError, match=r"tensors of shapes|values of type"):
        join_batches(batches)


def test_permuted_batch_has_the_same_pairs():
    x = torch.arange(8.0).reshape(8, 1)
    batch = [x, x[:, 0] * 10, [f"{i}" for i in range(8)]]
    inputs, labels, names = permute_batch(batch, 3)
    assert not torch.equal(inputs, x)
    assert torch.equal(inputs[:, 0] * 10, labels)
    assert [float(name) for name in names] == inputs[:, 0].tolist()
    assert sorted(inputs[:, 0].tolist()) == x[:, 0].tolist()
