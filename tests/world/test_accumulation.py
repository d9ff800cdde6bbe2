"""Gradient accumulation by model, and groups of batches that a loop leaves unfinished."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


class Sum(nn.Module):
    """A model whose parameter's gradient is the mean of its inputs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return (self.weight * x).mean()


def made(world, accumulate):
    model = Sum()
    return world.distribute(
        model, torch.optim.SGD(model.parameters(), lr=1.0), accumulate=accumulate
    )


def loader_of(world, values, batch=1):
    data = TensorDataset(torch.tensor(values, dtype=torch.float32))
    return world.shard(DataLoader(data, batch_size=batch))


@pytest.mark.parametrize("order", [(4, 1), (1, 4)])
def test_each_model_accumulates_its_own_number_of_batches(world, order):
    models = [made(world, accumulate) for accumulate in order]
    steps = [0, 0]
    for (x,) in world.batches(loader_of(world, range(16), batch=2)):
        for i, (model, optimizer) in enumerate(models):
            world.backward(model(x))
            steps[i] += world.step(optimizer)
    assert steps == [8 // accumulate for accumulate in order]
    # Each group of batches is averaged: 8 batches of mean 0.5, 2.5, ... 14.5 in 2 groups or in 8.
    for accumulate, (model, _) in zip(order, models, strict=True):
        assert -model.weight.item() == pytest.approx(60 / accumulate)


def test_uneven_last_group_is_averaged_by_samples_with_two_models(world):
    four, _ = pair = made(world, 4)
    made(world, 1)
    for (x,) in world.batches(loader_of(world, range(7), batch=2)):  # 2 + 2 + 2 + 1 samples
        world.backward(four(x))
        world.step(pair[1])
    assert -four.weight.item() == pytest.approx(3.0)


def test_optimizer_of_models_that_accumulate_differently_is_rejected(world):
    one, other = Sum(), Sum()
    world.distribute(one, accumulate=2)
    world.distribute(other)
    optimizer = torch.optim.SGD([one.weight, other.weight], lr=1.0)
    world.backward(one(torch.ones(1)) + other(torch.ones(1)))
    with pytest.raises(ValueError, match=r"accumulate=1 and 2.*HINT: set the same accumulate"):
        world.step(optimizer)


def test_group_left_by_break_is_discarded_with_warning(world, capfd):
    model, optimizer = made(world, 4)
    loader = loader_of(world, [5.0] * 6 + [7.0] * 6)
    for i, (x,) in enumerate(world.batches(loader)):
        world.backward(model(x))
        world.step(optimizer)
        if i == 5:
            break
    assert model.weight.grad is None
    before = model.weight.item()
    for (x,) in world.batches([torch.ones(1)] * 4):
        world.backward(model(x[None]))
        world.step(optimizer)
    assert before - model.weight.item() == pytest.approx(1.0)
    said = capfd.readouterr().err
    assert "DataLoader(TensorDataset) (test_accumulation.py:" in said
    assert "2 of 4 accumulated batches" in said
    assert "HINT" in said


def test_exception_inside_a_group_is_not_taken_for_a_break(world, capfd):
    model, _ = made(world, 4)

    def fail():
        for (x,) in world.batches(loader_of(world, range(8))):
            world.backward(model(x))
            raise RuntimeError("of the script")

    with pytest.raises(RuntimeError):
        fail()
    assert "warning" not in capfd.readouterr().err


def test_rest_of_unsharded_loop_and_of_stream_is_stepped(world, capfd):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.full((6,), 2.0))

    stream = world.shard(DataLoader(Stream(), batch_size=1))
    for loader in ([torch.tensor([2.0])] * 6, (torch.tensor([2.0]) for _ in range(6)), stream):
        model, optimizer = made(world, 4)
        stepped = 0
        for x in world.batches(loader):
            world.backward(model(x))
            stepped += world.step(optimizer)
        assert stepped == 2
        assert model.weight.grad is None
        assert -model.weight.item() == pytest.approx(4.0)
    assert "accumulated" not in capfd.readouterr().err


def test_evaluation_inside_a_training_loop_keeps_the_batch(world):
    model, optimizer = made(world, 2)
    validation = DataLoader(TensorDataset(torch.ones(3)), batch_size=1)
    validation = world.shard(validation, every_sample_once=True)
    for (x,) in world.batches(loader_of(world, [6.0] * 4)):
        for _ in world.batches(validation):
            pass
        world.backward(model(x))
        world.step(optimizer)
    assert -model.weight.item() == pytest.approx(12.0)


@pytest.mark.parametrize("how", ["whole", "break"])
def test_loop_inside_a_training_loop_keeps_the_outer_group(world, capfd, how):
    generator, g_optimizer = made(world, 4)
    critic, c_optimizer = made(world, 1)
    critic_loader = loader_of(world, range(3))
    stepped = []
    for (x,) in world.batches(loader_of(world, range(8))):
        for (y,) in world.batches(critic_loader):
            world.backward(critic(y))
            assert world.step(c_optimizer)
            if how == "break":
                break
        world.backward(generator(x))
        stepped.append(world.step(g_optimizer))
    assert stepped == [False, False, False, True] * 2
    assert -generator.weight.item() == pytest.approx(1.5 + 5.5)  # means of 0 to 3, and of 4 to 7
    assert "warning" not in capfd.readouterr().err


@pytest.mark.parametrize("sharded", [True, False])
def test_loop_without_gradients_inside_a_training_loop_keeps_the_outer_group(world, capfd, sharded):
    model, optimizer = made(world, 4)
    inner = loader_of(world, range(6)) if sharded else [torch.ones(1)] * 6
    stepped = []
    for (x,) in world.batches(loader_of(world, range(4))):
        world.backward(model(x))
        with torch.no_grad():
            for _ in world.batches(inner):
                pass
        stepped.append(world.step(optimizer))
    assert stepped == [False, False, False, True]
    assert -model.weight.item() == pytest.approx(1.5)
    assert "warning" not in capfd.readouterr().err


def test_inner_loop_left_inside_its_own_group_discards_only_that(world, capfd):
    outer, o_optimizer = made(world, 2)
    inner, _ = made(world, 4)
    for (x,) in world.batches(loader_of(world, [3.0, 5.0])):
        for (y,) in world.batches(loader_of(world, range(8))):
            world.backward(inner(y))
            break
        assert inner.weight.grad is None
        world.backward(outer(x))
        world.step(o_optimizer)
    assert -outer.weight.item() == pytest.approx(4.0)
    assert "1 of 4 accumulated batches" in capfd.readouterr().err


def test_checkpoint_is_not_due_inside_the_group_of_an_outer_loop(world):
    model, optimizer = made(world, 2)
    between_steps = []
    for (x,) in world.batches(loader_of(world, range(2))):
        inner = world.batches(loader_of(world, range(2)))
        between_steps += [world._training.between_steps for _ in inner]
        world.backward(model(x))
        world.step(optimizer)
    assert between_steps == [False, True, False, False]  # (the inner loop has groups of its own)
