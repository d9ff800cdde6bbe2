"""Activations on the host: the numbers stay the same, and the device's memory is released.

The copies run on the CPU here, where "device" and host are the same memory.
"""

import copy
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paceline.parallel.recompute import host_activations, recomputation
from paceline.parallel.recompute.host_activations import (
    LeavingStorages,
    activations_on_host,
    is_movable,
)
from paceline.parallel.recompute.recomputation import Way, recompute_blocks


class Block(nn.Module):
    """Saves views of a tensor, an output, dropout's mask and what batch norm needs."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(16, 64), nn.Linear(32, 16), nn.BatchNorm1d(16)

    def forward(self, x):
        one, two = self.a(x).chunk(2, dim=1)
        hidden = torch.sigmoid(one) * torch.tanh(two)
        hidden = torch.exp(hidden)
        return self.norm(x + self.b(nn.functional.dropout(hidden, 0.2))).transpose(0, 1).relu().t()


def gradients(block, x, on_host, backwards=1):
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    if on_host:
        with activations_on_host(block, lambda tensor: True):
            y = block(x)
    else:
        y = block(x)
    for k in range(backwards):
        y.square().sum().backward(retain_graph=k + 1 < backwards)
    return [y.detach(), x.grad, *(p.grad for p in block.parameters()), *block.buffers()]


@pytest.mark.parametrize("backwards", [1, 3])
def test_gradients_are_the_same_bit_for_bit(backwards):
    torch.manual_seed(0)
    plain = Block()
    moved = copy.deepcopy(plain)
    x = torch.randn(8, 16)
    expected = gradients(plain, x, False, backwards)
    found = gradients(moved, x, True, backwards)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_tensor_changed_in_place_keeps_the_value_that_was_saved():
    x = torch.arange(4.0, requires_grad=True)
    with activations_on_host(nn.Module(), lambda tensor: True):
        y = x * 1
        z = y.sin()
        y.mul_(2)
        w = y.cos()
    (z + w).sum().backward()
    assert torch.allclose(x.grad, torch.cos(x) - 2 * torch.sin(2 * x))


def test_parameters_stay_and_activations_leave():
    block, kept = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), []
    hooks = activations_on_host(block, lambda tensor: True)
    x = torch.ones(2, 4)
    packed = [hooks.pack_hook(t) for t in (block[0].weight, block[0].weight.t(), x, x.t(), x[1])]
    assert [isinstance(one, torch.Tensor) for one in packed] == [True, True, False, False, False]
    assert len({id(one.moved) for one in packed[2:]}) == 1
    for one, expected in zip(packed[2:], (x, x.t(), x[1]), strict=True):
        kept.append(hooks.unpack_hook(one))
        assert torch.equal(kept[-1], expected)
        assert kept[-1].stride() == expected.stride()
    assert packed[2].moved.back is None
    assert len({t.untyped_storage()._cdata for t in kept}) == 1
    assert kept[0].data_ptr() != x.data_ptr()


def test_small_tensors_and_those_of_the_cpu_are_not_moved():
    assert not is_movable(torch.ones(1 << 20))


@pytest.mark.parametrize(
    ("seconds_per_byte", "free", "expected"),
    [
        (1e-15, 1 << 40, "moved to the host's memory"),
        (1.0, 1 << 40, "recomputed"),
        (1e-15, 1000, "recomputed"),
    ],
)
def test_auto_moves_activations_where_that_is_faster_and_fits(
    monkeypatch, seconds_per_byte, free, expected
):
    monkeypatch.setattr(recomputation, "is_movable", lambda tensor: True)
    monkeypatch.setattr(recomputation, "seconds_per_byte", lambda device: seconds_per_byte)
    monkeypatch.setattr(recomputation, "free_bytes", lambda device: free)
    model, said = nn.Sequential(*(Block() for _ in range(4))), []
    recompute_blocks(model, "auto", 0.0006, None, said.append)
    model(torch.randn(512, 16)).sum().backward()
    assert expected in said[0]
    assert ("moved" in said[0]) == ("moved" in expected)


@pytest.mark.parametrize(("budget", "expected"), [(1100, 3), (1300, 2), (2000, 0)])
def test_storages_on_their_way_to_the_host_are_part_of_the_budget(monkeypatch, budget, expected):
    leaving = LeavingStorages()
    monkeypatch.setattr(recomputation, "leaving_storages", lambda device: leaving)
    ways = [[Way("keep", 500, 0, 0.0), Way("host", 0, 500, 1.0)] for _ in range(4)]
    choice = recomputation._choose(ways, budget, torch.device("cpu"))
    assert choice.names.count("host") == expected
    kept = 500 * choice.names.count("keep")
    assert kept + (leaving.limit if expected else 0) <= budget


def test_memory_is_freed_after_the_computing_stream_has_waited_for_its_copy(monkeypatch):
    monkeypatch.setattr(host_activations, "MAX_LEAVING_BYTES", 100)
    leaving, waits = LeavingStorages(), []
    stream = SimpleNamespace(wait_event=lambda copied: waits.append((copied, alive())))
    storages = {name: torch.zeros(60, dtype=torch.uint8) for name in "abc"}
    references = {name: weakref.ref(tensor) for name, tensor in storages.items()}

    def alive():
        return [name for name, reference in references.items() if reference() is not None]

    for name in "abc":
        leaving.add(storages.pop(name), stream, name)
    assert waits == [("a", ["a", "b", "c"]), ("b", ["b", "c"])]
    assert alive() == ["c"]
    leaving.free()
    assert waits[2:] == [("c", ["c"])]
    assert alive() == []
