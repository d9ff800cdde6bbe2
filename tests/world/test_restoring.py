"""Restoring a state in the memory that a model and its optimizer have."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.checkpoint.sharded_tensor import SavedTensor, copy_into
from paceline.world.restoring import load_part

sys.path.append(str(Path(paceline.__file__).parents[2] / "benchmarks/scripts/layouts"))
from allocator_peak import measure_growth


def trained(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)), nn.BatchNorm1d(256))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 256)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_restored_state_is_in_the_same_memory():
    model, optimizer = trained(0)
    other, other_optimizer = trained(1)
    saved = copy.deepcopy((other.state_dict(), other_optimizer.state_dict()))
    before = [p.data_ptr() for p in model.parameters()]

    def restore():
        torch.zeros(1)  # the profiler has to see one allocation
        load_part(model, saved[0], "models")
        load_part(optimizer, saved[1], "optimizers")

    assert measure_growth(restore) < 256 * 256 * 4  # one tensor of 32
    assert [p.data_ptr() for p in model.parameters()] == before
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved[0][name]), name
    for key, states in optimizer.state_dict()["state"].items():
        assert all(torch.equal(states[name], saved[1]["state"][key][name]) for name in states)
    other_optimizer.step()  # the saved tensors are not those of the optimizer
    first = optimizer.state[model[0].weight]["exp_avg"]
    assert first.data_ptr() != saved[1]["state"][0]["exp_avg"].data_ptr()


def test_new_optimizer_gets_tensors_of_its_own():
    model, _ = trained(0)
    _, other_optimizer = trained(1)
    optimizer = torch.optim.Adam(model.parameters())
    saved = other_optimizer.state_dict()
    load_part(optimizer, saved, "optimizers")
    for one, other in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert torch.equal(one["exp_avg"], other["exp_avg"])
        assert one["exp_avg"].data_ptr() != other["exp_avg"].data_ptr()


@pytest.mark.parametrize(
    ("dest", "fits"),
    [
        (torch.zeros(4, 2), True),
        (torch.zeros(()), False),
        (torch.zeros(4, 3), False),
        (torch.zeros(4, 2, dtype=torch.float64), False),
        (torch.zeros(4, 1).expand(4, 2), False),
        (torch.zeros(4, 2, device="meta"), False),
        (nn.UninitializedParameter(), False),
        (torch.zeros(4, 2).to_sparse(), False),
        (None, False),
    ],
)
def test_only_tensors_of_the_same_kind_are_filled(dest, fits):
    saved = SavedTensor.of(
        [
            {"shape": (4, 2), "offset": (0, 0), "tensor": torch.ones(1, 2)},
            {"shape": (4, 2), "offset": (1, 0), "tensor": torch.full((3, 2), 2.0)},
        ]
    )
    for one in (saved, saved.whole()):
        assert copy_into(one, dest) == fits
    if fits:
        assert torch.equal(dest, saved.whole())
