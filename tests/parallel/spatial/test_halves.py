"""Convolutions of one volume in two halves equal those at once."""

import pytest
import torch

from paceline.parallel.spatial import convolution
from paceline.parallel.spatial.convolution import Geometry

# shape, stride, padding, dilation, kernel; odd and even numbers of outputs, gaps between windows
CASES = [
    ((7, 6, 5), 1, 1, 1, (3, 3, 3)),
    ((5, 9, 8), 2, 1, 1, (3, 3, 3)),
    ((5, 9, 8), 3, 0, 1, (2, 1, 4)),
    ((7, 6, 5), 3, 2, 2, (2, 1, 3)),
    ((9, 4, 4), 1, 2, 2, (3, 3, 3)),
]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(convolution, "MIN_PRODUCTS", 1)


def test_halves_equal_the_whole_volume(monkeypatch):
    torch.manual_seed(0)
    for case in CASES:
        with monkeypatch.context() as patches:
            check_case(patches, *case)


def check_case(monkeypatch, shape, stride, padding, dilation, kernel):
    how = Geometry(torch.conv3d, (stride, 1, 1), (padding, 1, padding), (dilation, 1, 1), 1)
    rows = torch.randn(1, 2, *shape, requires_grad=True)
    weight = torch.randn(3, 2, *kernel, requires_grad=True)
    bias = torch.randn(3, requires_grad=True)
    given = (rows, weight, bias)
    expected = torch.conv3d(*given, how.stride, how.padding, how.dilation)
    direction = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, given, direction)
    used = []
    plain = convolution._Halves.stack
    monkeypatch.setattr(convolution._Halves, "stack", lambda *a: used.append(a) or plain(*a))
    with torch.no_grad():
        found = how.convolve(*given)
        gradients = how.gradients(direction, rows, weight, True, (True, True, True))
    assert len(used) == 2
    for a, b in zip((found, *gradients), (expected, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"samples": 2},
        {"dtype": torch.float64},
        {"groups": 2},
        {"rows": 128},  # which PyTorch gives to oneDNN itself
        {"kernel": 1},
    ],
)
def test_other_convolutions_are_those_of_pytorch(change):
    shape = (change.get("samples", 1), 4, change.get("rows", 8), 64, 8)
    rows = torch.zeros(shape, dtype=change.get("dtype", torch.float32))
    groups = change.get("groups", 1)
    weight = torch.zeros(4, 4 // groups, *[change.get("kernel", 3)] * 3, dtype=rows.dtype)
    how = Geometry(torch.conv3d, (1, 1, 1), (1, 1, 1), (1, 1, 1), groups)
    assert convolution._Halves.of(how, rows, weight) is None
