"""Passes through a sharded loader that a script does not complete, in ``world.batches``."""

import gc

import pytest
import ranks
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

KEPT = """
    import itertools, os, signal, sys
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    world = paceline.init(progress=False)
    data = TensorDataset(torch.arange(40))
    loader = world.shard(DataLoader(data, 4, shuffle=True))
    validation = world.shard(DataLoader(data, 4), every_sample_once=True)
    expected = [[x.tolist() for (x,), _ in loader.iterate(epoch)] for epoch in range(4)]
    for epoch in world.epochs(4, checkpoint=sys.argv[1], every=2):
        passing = world.batches(loader)  # the iterator of the last epoch is freed only after this
        for number, (x,) in enumerate(itertools.islice(passing, 5)):
            assert x.tolist() in expected[epoch], (epoch, number)
            world._recorder.end_of_step()
            if (epoch, number) == (2, 3) and not os.path.exists(sys.argv[1] + ".killed"):
                open(sys.argv[1] + ".killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        checking = world.batches(validation)
        assert next(checking)[0].tolist() == [0, 1, 2, 3]
        with open(sys.argv[1] + ".log", "a") as log:
            print(epoch, number, file=log)

    world.epochs(1)
    first, second = world.batches(loader), world.batches(loader)
    pairs = [(next(first)[0].tolist(), next(second)[0].tolist()) for _ in range(3)]
    assert all(one != other for one, other in pairs)
"""


def test_passes_whose_iterators_are_kept_have_orders_of_their_own(tmp_path):
    script = ranks.write(tmp_path, KEPT)
    out = tmp_path / "checkpoint"
    first = ranks.run(script, out, ranks=1, launcher="python", check=False)
    assert (tmp_path / "checkpoint.killed").exists(), first.stderr
    ranks.run(script, out, ranks=1, launcher="python")
    lines = (tmp_path / "checkpoint.log").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["0", "1", "2", "3"]


DATA = TensorDataset(torch.ones(8, 2))


@pytest.fixture
def model(world):
    model = nn.Linear(2, 1)
    return world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


def loaders_of(world):
    training = world.shard(DataLoader(DATA, batch_size=2))
    return training, world.shard(DataLoader(DATA, batch_size=2), every_sample_once=True)


def test_validation_whose_iterator_is_kept_ends_before_the_training_loop(world, model):
    net, optimizer = model
    loader, validation = loaders_of(world)
    kept = world.batches(validation)
    next(kept)
    assert not net.training
    for (x,) in world.batches(loader):
        assert net.training
        world.backward(net(x).mean())
        assert world.step(optimizer)
    with pytest.raises(ValueError, match=r"inside the validation pass over .* and ended it. HINT"):
        next(kept)


@pytest.mark.parametrize("kept_order", [1, -1])
def test_validations_freed_in_any_order_restore_mode_and_gradients(world, model, kept_order):
    net, _ = model
    kept = [world.batches(loaders_of(world)[1]) for _ in range(2)]
    for iterator in kept:
        next(iterator)
    for iterator in kept[::kept_order]:
        iterator.close()
    assert net.training
    assert torch.is_grad_enabled()


def test_freed_iterator_of_a_validation_leaves_the_next_validation_alone(world, model):
    _, validation = loaders_of(world)
    kept = [world.batches(validation)]
    next(kept[0])
    for number, _ in enumerate(world.batches(validation)):
        if number == 0:
            share = world._training.evaluation_share
            for _ in world.batches(validation):  # a validation inside a validation
                pass
            assert world._training.evaluation_share is share
        assert not torch.is_grad_enabled()
    kept.clear()
    gc.collect()
    assert torch.is_grad_enabled()


def test_batch_of_a_pass_that_an_inner_loop_over_the_same_loader_ended_is_ended(world, model):
    net, optimizer = model
    loader, _ = loaders_of(world)
    for number, _ in enumerate(world.batches(loader)):
        for (x,) in world.batches(loader):
            world.backward(net(x).mean())
            world.step(optimizer)
            break
        if number == 1:
            break
    accumulations = world._training.accumulations
    assert accumulations.batch is None
    assert not any(model.groups for model in accumulations.models)


def test_loop_left_with_its_iterator_kept_is_published(world, model):
    net, optimizer = model
    loader, _ = loaders_of(world)
    for _ in world.epochs(1):
        kept = world.batches(loader)
        for (x,) in kept:
            world.backward(net(x).mean())
            world.step(optimizer)
            break
    left, line = world._log.left
    assert left == "the loop over DataLoader(TensorDataset) after batch 1 of epoch 1"
    assert "test_abandoned_passes.py:" in line
