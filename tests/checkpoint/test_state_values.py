"""Values that a checkpoint can hold are restored equal; the others are rejected at save."""

import enum

import numpy as np
import pytest
import torch

from paceline.checkpoint import state_tree
from paceline.checkpoint.saver import CheckpointSaver, load_checkpoint
from paceline.checkpoint.shared_state import SharedState


def restored(folder, value):
    """Save a value as replicated state and load it; fail on a warning."""
    one = CheckpointSaver(folder, 0, 1, None, pytest.fail, 5.0)
    one.save(1, SharedState({"value": value}), {"value": value}, {})
    one.wait()
    shared, (own,), _ = load_checkpoint(folder / "step-00000001")
    return shared["value"], own["value"]


@pytest.mark.parametrize("value", [2**2039 - 1, 1 - 2**2039, 0, True], ids=["max", "min", "0", "t"])
def test_integers_are_restored(tmp_path, value):
    assert restored(tmp_path, [value, {value: value}, (value,)])[0] == [
        value,
        {value: value},
        (value,),
    ]


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


class Color(enum.IntEnum):
    RED = 1


UNSUPPORTED = {
    "integer": 2**2039,
    "negative integer": -(2**5000),
    "integer in a set": {2**2040},
    "integer as key": {2**2040: 1},
    "integer in a tuple key": {(1, 2**2040): 1},
    "enum as key": {Color.RED: 1},
    "levels": nested(201),
    "name of a marker": {"__paceline_tensor__": 3},
    "tensor in a set": {torch.ones(1)},
    "meta tensor": torch.ones(2, device="meta"),
    "tensor subclass": torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("value", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_values_that_could_not_be_loaded_are_rejected_at_save(tmp_path, value):
    with pytest.raises(ValueError, match=r"(?s)state\['value'\].* can't hold.*HINT"):
        restored(tmp_path, value)
    assert list(tmp_path.iterdir()) == []


def test_list_that_contains_itself_is_rejected():
    value = []
    value.append(value)
    with pytest.raises(ValueError, match="HINT"):
        state_tree.flatten({"value": value})


def test_deepest_allowed_tree_is_restored(tmp_path):
    assert restored(tmp_path, nested(190))[1] == nested(190)


def test_numpy_scalars_as_keys_are_restored_as_numbers(tmp_path):
    value, _ = restored(tmp_path, {np.float64(0.5): 1, np.int64(2): 2, np.str_("a"): 3})
    assert value == {0.5: 1, 2: 2, "a": 3}
    assert [type(key) for key in value] == [float, int, str]


DENSE = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
LAYOUTS = {
    "coo": lambda: DENSE.to_sparse(),
    "csr": lambda: DENSE.to_sparse_csr(),
    "csc": lambda: DENSE.to_sparse_csc(),
    "bsr": lambda: DENSE.to_sparse_bsr((1, 1)),
    "bsc": lambda: DENSE.to_sparse_bsc((1, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_tensors_are_restored(tmp_path, layout):
    for value in restored(tmp_path, LAYOUTS[layout]()):
        assert value.layout == LAYOUTS[layout]().layout
        assert torch.equal(value.to_dense(), DENSE)
