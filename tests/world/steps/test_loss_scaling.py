"""Loss scaling of float16: one update of the scale for all optimizers of a step."""

import pytest
import torch
from torch import nn


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.weight * x


@pytest.fixture
def pairs(world_float16):
    return [
        world_float16.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for model in (Scalar(), Scalar())
    ]


@pytest.mark.parametrize("inf", [False, True])
def test_second_optimizer_of_a_step_unscales_with_the_same_scale(world_float16, pairs, inf):
    world = world_float16
    (one, first), (other, second) = pairs
    if inf:
        one.weight.register_hook(lambda gradient: gradient * float("inf"))
    world.backward(one(torch.ones(())) + other(torch.ones(())))
    assert world.step(first) is not inf
    assert world.step(second) is True
    assert one.weight.item() == (0.0 if inf else -1.0)
    assert other.weight.item() == -1.0
    assert world._training.scaler.get_scale() == (4.0 if inf else 16.0)  # one update, not two


def test_separate_backwards_of_two_optimizers_are_exact(world_float16, pairs):
    """As in a GAN: the second loss also reaches the first model, whose gradient is left over."""
    world = world_float16
    (one, first), (other, second) = pairs
    for _ in world.batches([torch.ones(1)] * 3):
        first.zero_grad()
        world.backward(one(torch.ones(())))
        assert world.step(first)
        world.backward(one(torch.ones(())) + other(torch.ones(())))
        assert world.step(second)
    assert one.weight.item() == -3.0
    assert other.weight.item() == -3.0


def test_pending_gradients_follow_a_changed_scale(world_float16):
    world = world_float16
    one, other = Scalar(), Scalar()
    first = torch.optim.SGD(one.parameters(), lr=1.0)
    second = torch.optim.SGD(other.parameters(), lr=1.0)
    world.distribute(one, first)
    world.distribute(other, second, accumulate=4)
    for (x,) in world.batches([torch.ones(1, 1)] * 4):
        world.backward(one(x).mean() + other(x).mean())
        world.step(first)
        world.step(second)
    assert one.weight.item() == pytest.approx(-4.0)
    assert other.weight.item() == pytest.approx(-1.0)


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_step_returns_false_and_does_not_advance_the_warm_up(world_float16, fused):
    world = world_float16
    model, other = Scalar(), Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
    second = torch.optim.SGD(other.parameters(), lr=0.5)
    for each in (optimizer, second):
        world.scale_learning_rate(each, global_batch=2, reference_batch=1, warmup=5)
    world.distribute(model, optimizer)
    world.distribute(other, second)
    rates = [each.param_groups[0]["lr"] for each in (optimizer, second)]
    overflow = model.weight.register_hook(lambda gradient: gradient * float("inf"))
    world.backward(model(torch.ones(())))
    overflow.remove()
    assert world.step(optimizer) is False
    assert [each.param_groups[0]["lr"] for each in (optimizer, second)] == rates
    world.backward(model(torch.ones(())))
    assert world.step(optimizer) is True
    assert optimizer.param_groups[0]["lr"] > rates[0]
    assert second.param_groups[0]["lr"] == rates[1]  # its own warm-up, with its own steps
