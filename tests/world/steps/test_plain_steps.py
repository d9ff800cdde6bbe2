"""A plain ``optimizer.step()`` after ``world.backward``."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

VALUES = torch.arange(1.0, 9.0).view(8, 1)


def trained(world, step, accumulate=1):
    """Return the weight of a model after each step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = world.distribute(model, optimizer, accumulate=accumulate)
    loader = world.shard(DataLoader(TensorDataset(VALUES), batch_size=2))
    weights = []
    for (x,) in world.batches(loader):
        world.backward(model(x).square().mean())
        step(world, model, optimizer)
        weights.append(float(model.weight.detach()))
    return weights


def plain(world, model, optimizer):
    optimizer.step()


def zeroed(set_to_none):
    def step(world, model, optimizer):
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)

    return step


@pytest.mark.parametrize("step", [plain, zeroed(True), zeroed(False)])
def test_plain_step_equals_the_one_of_world(world, step):
    expected = trained(world, lambda world, model, optimizer: world.step(optimizer))
    assert trained(world, step) == expected


@pytest.mark.parametrize("step", [plain, lambda world, model, optimizer: world.step(optimizer)])
def test_warm_up_advances_with_every_kind_of_step(world, step):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.scale_learning_rate(optimizer, global_batch=8, reference_batch=1, warmup=7)
    model, optimizer = world.distribute(model, optimizer)
    rates = []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        world.backward(model(VALUES).mean())
        step(world, model, optimizer)
    assert rates == pytest.approx([0.1 * factor for factor in range(1, 9)])


def test_learning_rate_is_scaled_once(world):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    world.scale_learning_rate(optimizer, global_batch=8, reference_batch=4)
    with pytest.raises(ValueError, match=r"was scaled before\. HINT: call it once, before the"):
        world.scale_learning_rate(optimizer, global_batch=8, reference_batch=4)
    assert optimizer.param_groups[0]["lr"] == 0.2
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match="rule must be"):
        world.scale_learning_rate(optimizer, global_batch=8, reference_batch=4, rule="cubic")
    world.scale_learning_rate(optimizer, global_batch=8, reference_batch=4)


def test_warm_up_without_effect_is_told(world, monkeypatch):
    lines = []
    monkeypatch.setattr(world._progress, "say", lines.append)
    for batch, warmup in ((4, 10), (2, 10), (4, 0), (8, 10)):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        world.scale_learning_rate(optimizer, global_batch=batch, reference_batch=4, warmup=warmup)
    assert [line.partition(" (")[2].partition(")")[0] for line in lines] == [
        "global_batch=4, reference_batch=4",
        "global_batch=2, reference_batch=4",
    ]
    assert all("warmup=10 has no effect" in line and "HINT" in line for line in lines)


def test_learning_rate_that_changes_in_the_step_stays_changed(world):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    model, optimizer = world.distribute(model, optimizer)
    for expected in (0.5, 0.25):
        world.backward(model(VALUES).mean())
        world.step(optimizer)
        assert optimizer.param_groups[0]["lr"] == expected


def test_gradients_of_a_plain_backward_after_the_step_are_kept(world):
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = world.distribute(model, optimizer)
    for zero in (None, True, False):
        model.weight.grad = None
        world.backward(model(VALUES).mean())
        optimizer.step()
        if zero is not None:
            optimizer.zero_grad(set_to_none=zero)
        model(VALUES).mean().backward()
        world.backward(model(VALUES).mean())
        times = 2 if zero is not None else 3  # the script itself has added to the used gradient
        assert float(model.weight.grad) == pytest.approx(times * 4.5)


def test_two_optimizers_may_use_the_gradients_of_one_backward(world):
    model = torch.nn.Linear(1, 2, bias=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    model, _ = world.distribute(model, optimizers[0])
    before = model.weight.detach().clone()
    world.backward(model(VALUES).sum())
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.2 * 36)


def test_plain_step_inside_an_accumulation_is_an_error(world):
    with pytest.raises(ValueError, match=r"SGD.step\(\) is inside an accumulation of 2 batches"):
        trained(world, plain, accumulate=2)


def test_plain_step_with_scaled_gradients_is_an_error(world_float16):
    with pytest.raises(ValueError, match="uses gradients that precision='fp16' has scaled"):
        trained(world_float16, plain)
