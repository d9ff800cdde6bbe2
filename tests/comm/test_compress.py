"""Gradient compression in one process: gradients reach their own parameters, at once or later."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.comm import compress
from paceline.comm.compress import TopK, topk_hook
from paceline.knobs.knob import KnobResult


@pytest.fixture(autouse=True)
def _group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Crossed(torch.nn.Module):
    """Parameters whose gradients are ready in another order than that of their registration."""

    def __init__(self):
        super().__init__()
        self.each = torch.nn.ParameterList(torch.zeros(8) for _ in range(3))

    def forward(self, gradients):
        one, two, three = self.each
        total = (gradients[0] * one).sum()
        total = total + (total.detach() * 0 + 1) * (gradients[2] * three).sum()
        return total + (gradients[1] * two).sum()


@pytest.mark.parametrize("bucket_mb", [25, 1e-5], ids=["one bucket", "a bucket each"])
def test_topk_residual_reaches_its_parameter_after_buckets_are_rebuilt(bucket_mb):
    net = Crossed()
    model = DistributedDataParallel(net, bucket_cap_mb=bucket_mb)
    model.register_comm_hook(TopK(0.125, dist.group.WORLD), topk_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    gradients = torch.arange(1.0, 25).view(3, 8)
    for step in range(30):  # only the first one has gradients; the others send what it left
        optimizer.zero_grad()
        model(gradients if step == 0 else 0 * gradients).backward()
        optimizer.step()
    for one, gradient in zip(net.each, gradients, strict=True):
        torch.testing.assert_close(one.detach(), -gradient)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_powersgd_of_gradients_without_values_is_finite(monkeypatch, rank):
    """The weights of a part that a loss does not depend on have gradients of zeros."""
    makers = []
    monkeypatch.setattr(compress, "hooked", lambda _, make: makers.append(make))
    compress.powersgd(rank, KnobResult("compress-powersgd"))
    net = torch.nn.Linear(16, 16, bias=False)
    model = DistributedDataParallel(net)
    model.register_comm_hook(*makers[0](model))
    for _ in range(8):
        model.zero_grad()
        (0 * model(torch.ones(2, 16))).sum().backward()
        assert (net.weight.grad == 0).all()


def test_topk_residual_keeps_rounding_of_float64_to_float32():
    net = torch.nn.Linear(8, 1, bias=False, dtype=torch.float64)
    model = DistributedDataParallel(net)
    model.register_comm_hook(TopK(0.125, dist.group.WORLD), topk_hook)
    x, found = torch.arange(1.0, 9, dtype=torch.float64) / 3, torch.zeros(8)
    for step in range(30):
        model.zero_grad()
        (model(x[None]).sum() * (step == 0)).backward()
        found = found + net.weight.grad[0]
    torch.testing.assert_close(found, x, rtol=1e-14, atol=0)


def test_topk_residual_of_overflowed_step_is_finite():
    """After such a step, which torch.amp skips, gradients are finite again."""
    net = torch.nn.Linear(8, 1, bias=False)
    model = DistributedDataParallel(net)
    model.register_comm_hook(TopK(0.125, dist.group.WORLD), topk_hook)
    for factor in (float("inf"), 1.0):
        model.zero_grad()
        (model(torch.ones(1, 8)) * factor).sum().backward()
        assert bool(net.weight.grad.isfinite().all()) == (factor == 1)
