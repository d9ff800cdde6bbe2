"""Batches of any kind are moved to the rank's device."""

from collections import UserDict, namedtuple

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from paceline.world.loops.training_loops import move_to_device

META = torch.device("meta")
Pair = namedtuple("Pair", "x y")


class Encoding(UserDict):
    """A batch as tokenizers make it."""


def test_tensors_in_nested_containers_are_moved():
    moved = move_to_device({"a": [torch.ones(2), "text"], "b": Pair(torch.ones(1), 3)}, META)
    assert moved["a"][0].is_meta
    assert moved["a"][1] == "text"
    assert moved["b"].x.is_meta
    assert moved["b"].y == 3


def test_tensors_of_a_user_dict_are_moved_in_a_copy():
    batch = Encoding(ids=torch.ones(2, 3), text=["one", "two"])
    moved = move_to_device(batch, META)
    assert type(moved) is Encoding
    assert moved["ids"].is_meta
    assert moved["text"] == ["one", "two"]
    assert not batch["ids"].is_meta


def test_packed_sequence_moves_itself_and_keeps_its_sizes():
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    moved = move_to_device([packed], META)[0]
    assert type(moved) is PackedSequence
    assert moved.data.is_meta
    assert moved.batch_sizes.tolist() == [2, 1, 1]


class Elsewhere:
    """An object whose ``to`` is something else."""

    def to(self, unit):
        if not isinstance(unit, str):
            raise TypeError(unit)


class InPlace:
    def to(self, device):
        self.device = device


def test_objects_whose_method_to_returns_no_batch_stay():
    batch = [Elsewhere(), InPlace()]
    assert move_to_device(batch, META) == batch
    assert batch[1].device == META
