"""Models that no ``world.distribute`` has seen, which ranks would train apart from each other."""

import gc

import pytest
import ranks
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from paceline.analyze.figures.report import analyse
from paceline.analyze.records.load_run import load_run
from paceline.parallel.distribution_check import DistributionCheck, unsharded_loaders_in_use
from paceline.parallel.mesh import Mesh
from paceline.parallel.strategy.distributed_model import DistributedModel

FORGOTTEN = """
    import sys, torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    import paceline

    what, options = sys.argv[1], dict(pair.split("=") for pair in sys.argv[2:])
    world = paceline.init(progress=False, **options)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    temperature = nn.Parameter(torch.ones(())) if what == "outside" else 1.0
    parameters = list(model.parameters())
    if what == "ddp":
        model = DistributedDataParallel(model)
    if what == "fsdp":
        from torch.distributed.fsdp import fully_shard
        fully_shard(model)
        parameters = list(model.parameters())
    if what == "outside":
        parameters.append(temperature)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    if what == "outside":
        model, optimizer = world.distribute(model, optimizer)
    for _ in range(3):
        loss = (model(torch.ones(3, 4)) * temperature).square().mean()
        world.backward(loss)
        if what == "by-hand":
            for p in parameters:
                torch.distributed.all_reduce(p.grad)
                p.grad /= world.size
        world.step(optimizer)
    print("done")
"""


PARTLY_USED = """
    import sys, torch
    from torch import nn
    import paceline

    what = sys.argv[1]
    world = paceline.init(progress=False)
    model = nn.Linear(4, 2)
    if what == "model":
        model = world.distribute(model)
    loader = torch.utils.data.DataLoader(torch.ones(24, 4), batch_size=4)
    if what == "loader":
        loader = world.shard(loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        optimizer.zero_grad()  # and a plain loss.backward()
        model(x).square().mean().backward()
        optimizer.step()
"""


def run(folder, what, *options, fails=False):
    script = ranks.write(folder, FORGOTTEN)
    result = ranks.run(script, what, *options, check=not fails)
    assert (result.returncode != 0) == fails
    return result.stderr


def test_forgotten_distribute_is_an_error_at_the_first_backward(tmp_path):
    said = run(tmp_path, "forgotten", fails=True)
    assert "world.backward(loss)" in said  # the line of the script
    assert "of a Sequential (and 3 more)" in said
    assert "HINT: model, optimizer = world.distribute(model, optimizer)" in said
    assert "Traceback" not in said


def test_parameter_outside_of_the_distributed_model_is_an_error_at_its_step(tmp_path):
    said = run(tmp_path, "outside", fails=True)
    assert "world.step(optimizer)" in said
    assert "a parameter of shape ()" in said


def test_models_that_the_script_distributes_are_accepted(tmp_path):
    assert "distribute" not in run(tmp_path, "ddp")
    assert "distribute" not in run(tmp_path, "by-hand", "replicas=ignore")
    assert run(tmp_path, "forgotten", "replicas=warn").count("HINT: model, optimizer = world") == 1


@pytest.mark.long
def test_fully_sharded_model_is_accepted(tmp_path):
    assert "distribute" not in run(tmp_path, "fsdp")


def check(mode="raise", size=2):
    said = []
    return DistributionCheck(Mesh(0, size), mode, said.append), said


def loss_of(*models):
    return sum(model(torch.ones(1, 2)).sum() for model in models)


def test_loss_that_also_reaches_a_frozen_part_or_inputs_is_accepted():
    """A network that only serves as a loss may need gradients, and is not trained."""
    checked, _ = check()
    trained, serving = nn.Linear(2, 2), nn.Linear(2, 2)
    checked.add_model(DistributedModel(trained))
    checked.check_loss(loss_of(trained, serving))
    checked, _ = check()
    checked.check_loss(torch.ones(2, requires_grad=True).sum())


def test_one_rank_and_ignored_replicas_are_not_checked():
    for checked, said in (check(size=1), check(mode="ignore")):
        checked.check_loss(loss_of(nn.Linear(2, 2)))
        assert not said


def test_parameters_frozen_at_distribute_are_reported_when_they_are_trained():
    checked, _ = check()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    checked.add_model(DistributedModel(model))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    loss_of(model).backward()
    checked.check_optimizer(optimizer)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    loss_of(model).backward()
    with pytest.raises(ValueError, match=r"0.weight of a Sequential \(and 1 more\)"):
        checked.check_optimizer(optimizer)


def test_parameters_with_hooks_of_their_own_are_accepted():
    checked, _ = check()
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    checked.check_loss(loss_of(model))


def test_models_that_can_not_be_searched_are_accepted():
    checked, _ = check()
    model = nn.Linear(2, 2)
    gc.freeze()
    try:
        checked.check_loss(loss_of(model))
    finally:
        gc.unfreeze()


def test_loader_iterator_that_is_being_constructed_is_passed_over():
    constructed = _SingleProcessDataLoaderIter.__new__(_SingleProcessDataLoaderIter)
    assert gc.is_tracked(constructed)
    kept = iter(DataLoader([1.0, 2.0]))
    assert "DataLoader(list)" in unsharded_loaders_in_use()
    del kept


@pytest.mark.parametrize("what", ["init", "model", "loader"])
def test_steps_of_an_optimizer_that_is_not_distributed_are_recorded(tmp_path, what):
    script = ranks.write(tmp_path, PARTLY_USED)
    record = tmp_path / "record"
    ranks.run(script, what, ranks=1, launcher=f"paceline --record {record}")
    report = analyse(load_run(record))
    assert (report.steps, report.unmatched) == (6, 0)
    if what != "model":  # whose batches neither the world nor its loop have seen
        assert report.samples == 20  # without the first step


@pytest.mark.parametrize("what", ["model", "loader"])
def test_plain_loop_over_a_loader_that_is_not_sharded_is_reported(tmp_path, what):
    script = ranks.write(tmp_path, PARTLY_USED)
    said = ranks.run(script, what).stderr
    assert ("each of 2 ranks processes all samples of DataLoader(Tensor)" in said) == (
        what == "model"
    )
