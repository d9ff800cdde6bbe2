"""Loops of a script that do something else than they seem to: each gets a line with the way out."""

import copy
import re

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from paceline.parallel.mesh import Mesh
from paceline.record.hooks import error_messages
from paceline.world.loops import loop_log
from paceline.world.loops.loop_log import LoopLog

DATA = TensorDataset(torch.ones(8, 2))


@pytest.fixture
def model(world):
    model = nn.Linear(2, 1)
    return world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


def evaluate(world, model, loader):
    for (x,) in world.batches(loader):
        model[0](x)


LOADERS = {
    "unsharded": lambda world: DataLoader(DATA, batch_size=4),
    "sharded": lambda world: world.shard(DataLoader(DATA, batch_size=4)),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_validation_in_training_mode_is_reported_with_loader_line_and_mode(
    world, model, capfd, kind
):
    loader = LOADERS[kind](world)
    for _ in range(2):
        evaluate(world, model, loader)
    said = capfd.readouterr().err
    assert said.count("warning") == 1
    assert "DataLoader(TensorDataset)" in said
    assert "test_loop_mistakes.py:" in said
    assert "in training mode, with gradients on" in said
    assert "HINT" in said
    assert "world.shard(loader, every_sample_once=True)" in said


@pytest.mark.parametrize("kind", LOADERS)
def test_training_and_validation_loops_are_not_reported(world, model, capfd, kind):
    loader = LOADERS[kind](world)
    net, optimizer = model
    for (x,) in world.batches(loader):
        world.backward(net(x).mean())
        world.step(optimizer)
    for (x,) in world.batches(loader):  # full-batch descent, by hand
        net(x).mean().backward()
    world.step(optimizer)
    for _ in world.batches(loader):  # statistics of the data
        pass
    net.eval()
    with torch.no_grad():
        evaluate(world, model, loader)
    net.train()
    evaluate(world, model, world.shard(DataLoader(DATA, batch_size=4), every_sample_once=True))
    assert "warning" not in capfd.readouterr().err


def test_step_without_backward_is_an_error_at_first_and_then_a_warning(world, model, capfd):
    net, optimizer = model
    with pytest.raises(ValueError, match=r"no parameter of the SGD has a gradient.*HINT"):
        world.step(optimizer)
    world.backward(net(torch.ones(1, 2)).mean())
    assert world.step(optimizer)
    step = world._recorder.step
    for _ in range(2):
        assert not world.step(optimizer)
    assert world._recorder.step == step
    said = capfd.readouterr().err
    assert said.count("no parameter of the SGD has a gradient") == 1
    assert "test_loop_mistakes.py:" in said


@pytest.mark.parametrize("steps_after", [False, True])
def test_gradients_of_a_loop_left_before_its_step_are_reported(world, model, capfd, steps_after):
    net, optimizer = model
    loader = world.shard(DataLoader(DATA, batch_size=4))
    for _ in range(2):
        for (x,) in world.batches(loader):
            world.backward(net(x).mean())
            break
        if steps_after:
            world.step(optimizer)
    said = capfd.readouterr().err
    left = "DataLoader(TensorDataset) (test_loop_mistakes.py:"
    assert (f"the loop over {left}" in said) != steps_after
    assert ("between world.backward and world.step, so its gradients" in said) != steps_after


def test_optimizer_made_anew_after_distribute_is_an_error(world, model):
    net, _ = model
    anew = torch.optim.Adam(net.parameters())
    world.backward(net(torch.ones(1, 2)).mean())
    with pytest.raises(ValueError, match=r"this Adam is not the SGD .*HINT: .*world.distribute"):
        world.step(anew)


def test_optimizer_that_replaces_one_that_has_stepped_counts_the_steps(world, model):
    net, optimizer = model
    anew = torch.optim.Adam(net.parameters())
    for each in (optimizer, anew, anew):
        world.backward(net(torch.ones(1, 2)).mean())
        world.step(each)
    assert world._recorder.step == 3


def test_backwards_without_a_known_step_are_reported(world, capfd):
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    world.distribute(net)
    for (x,) in world.batches(world.shard(DataLoader(DATA, batch_size=4))):
        world.backward(net(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    said = capfd.readouterr().err
    assert "2 backwards and no step of an optimizer that Paceline knows" in said
    assert "HINT: call world.step(optimizer)" in said


def test_optimizer_that_a_checkpoint_could_not_restore_is_reported(world, capfd, tmp_path):
    net = world.distribute(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in world.epochs(1, checkpoint=tmp_path / "ckpt"):
        world.backward(net(torch.ones(1, 2)).mean())
        world.step(optimizer)
    said = capfd.readouterr().err
    assert "the SGD was not known when world.epochs(checkpoint=...) began" in said
    assert "HINT: model, optimizer = world.distribute(model, optimizer)" in said


def test_backward_without_gradients_names_the_validation_pass_that_has_not_ended(world, model):
    net, _ = model
    kept = world.batches(world.shard(DataLoader(DATA, batch_size=4), every_sample_once=True))
    next(kept)
    loss = net(torch.ones(1, 2)).mean()  # a loop that is not one of world.batches
    pattern = (
        r"the validation pass over DataLoader\(TensorDataset\) \(test_loop_mistakes.py:\d+\) has "
        r"not ended and disables gradients. HINT: .*close\(\)"
    )
    with pytest.raises(ValueError, match=rf"^world.backward: the loss .*{pattern}"):
        world.backward(loss)
    with pytest.raises(RuntimeError) as plain:
        loss.backward()
    assert re.search(pattern, error_messages.format_error(plain.value))
    kept.close()
    world.backward(net(torch.ones(1, 2)).mean())


def test_backward_of_a_loss_without_gradient_is_an_error(world, model):
    loss = model[0](torch.ones(1, 2)).mean()
    with pytest.raises(ValueError, match=r"no parameter with requires_grad.*HINT"):
        world.backward(loss.detach())
    assert error_messages.explain_error(RuntimeError("does not require grad")) is None
    world.backward(loss)


def test_accumulation_outside_of_batches_is_reported(world, capfd):
    net = nn.Linear(2, 1)
    net, optimizer = world.distribute(net, torch.optim.SGD(net.parameters(), lr=0.1), accumulate=4)
    for _ in range(2):
        world.backward(net(torch.ones(1, 2)).mean())
        assert world.step(optimizer)
    said = capfd.readouterr().err
    assert said.count("accumulate=4 has no effect outside of world.batches") == 1


LOOPS = """
    import sys, torch
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    import paceline

    what = sys.argv[1]
    world = paceline.init(progress=False)
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4) if "buffers" in what else nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(4, 1))
    if "unused" in what:
        model = nn.ModuleDict({"used": model, "spare": nn.Linear(4, 4)})
        model.forward = lambda x: model.used(x)
    distributed, optimizer = world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.ones(80, 4))
    loader = DataLoader(data, batch_size=2)
    validation = world.shard(DataLoader(data, batch_size=4), every_sample_once=True)
    if "raw" not in what:
        loader = world.shard(loader)
    for epoch in world.epochs(2):
        for i, (x,) in enumerate(loader if "raw" in what else world.batches(loader)):
            world.backward(distributed(x).square().mean())
            world.step(optimizer)
            if "break" in what and world.rank == 1 and i == 17:
                break
        if "stop" in what and world.rank == 1:
            break
        if "alone" not in what or world.rank == 0:
            score = world.meter()
            for (x,) in world.batches(validation):
                score.add(sum=distributed(x).sum(), count=len(x))
            if "mean" in what:
                score.ratio("sum", "count")
    print("done")
    """


def run(folder, what, fails=True, **options):
    result = ranks.run(ranks.write(folder, LOOPS), what, check=False, **options)
    assert (result.returncode != 0) == fails, result.stderr
    return result.stderr


def line_of(text):
    return 1 + next(i for i, line in enumerate(LOOPS.splitlines()) if text in line)


@pytest.mark.parametrize(
    "what", ["break,buffers", *(pytest.param(w, marks=pytest.mark.long) for w in ("break", "stop"))]
)
def test_loop_left_by_one_rank_is_named_with_world_any(tmp_path, what):
    said = run(tmp_path, what)
    if what == "stop":
        assert "rank 1 left world.epochs in epoch 1" in said
    else:
        assert (
            "rank 1 left the loop over DataLoader(TensorDataset) after batch 18 of epoch 1" in said
        )
    assert "script.py:" in said
    assert "rank 0 did not. HINT: `if world.any(condition): break`" in said
    assert "Traceback" not in said
    assert len(said.splitlines()) < 30


@pytest.mark.parametrize(
    "what",
    ["alone", pytest.param("alone,buffers", marks=pytest.mark.long), "alone,mean"],
)
def test_validation_on_one_rank_is_an_error_that_names_loader_and_line(tmp_path, what):
    said = run(tmp_path, what)
    assert "only rank 0 iterated over" in said
    assert "DataLoader(TensorDataset)" in said
    assert "script.py:" in said
    assert "HINT: call world.batches(validation) on all ranks" in said
    assert "Traceback" not in said


def test_raw_loop_over_all_samples_is_reported(tmp_path):
    said = run(tmp_path, "raw", fails=False)
    assert said.count("each of 2 ranks processes all samples of DataLoader(TensorDataset)") == 1
    assert "HINT: for batch in world.batches(world.shard(loader))" in said


def test_advice_about_unused_parameters_names_them_and_distribute(tmp_path):
    said = run(tmp_path, "unused")
    assert "(spare.weight, spare.bias)" in said
    assert "world.distribute(model, optimizer, find_unused_parameters=True)" in said
    assert "torch.nn.parallel" not in said
    assert "Traceback" not in said


def test_loader_that_is_not_sharded_is_reported_on_several_ranks(world, capfd):
    world.mesh.shape["data"] = 2
    for sampler, warns in ((None, True), (DistributedSampler(DATA, 2, 0), False)):
        for _ in world.batches(DataLoader(DATA, batch_size=4, sampler=sampler)):
            pass
        said = capfd.readouterr().err
        assert ("is not sharded, so each of 2 ranks processes all of its batches" in said) == warns
        assert ("DataLoader(TensorDataset) (test_loop_mistakes.py:" in said) == warns


class Ranks:
    """Collectives of two ranks, of which rank 1 has already gone on."""

    def __init__(self, monkeypatch, log, other):
        self.entries = [copy.deepcopy((each.left, each.passes)) for each in (log, other)]
        monkeypatch.setattr(loop_log, "all_gather_objects", self.all_gather_objects)
        monkeypatch.setattr(dist, "all_gather", self.all_gather)

    def all_gather_objects(self, own, _):
        assert own == self.entries[0]
        return self.entries

    def all_gather(self, rows, own):
        for number, row in enumerate(rows):
            row.fill_(number)


def test_rank_that_is_ahead_is_not_taken_for_a_validation_alone(monkeypatch):
    store, said = dist.HashStore(), []
    log, ahead = (LoopLog(Mesh(rank, 2), store, True, said.append) for rank in range(2))
    for each in (log, ahead):
        each.begin_pass("validation", "loader")
    ahead.begin_pass("unsharded", "list")
    Ranks(monkeypatch, log, ahead)
    ahead.begin_pass("validation", "loader")  # of the next epoch
    log.compare()
    assert "only rank 1 iterated over list" in said[0]


def test_store_that_is_gone_does_not_end_a_comparison(monkeypatch):
    class Gone:
        def __getattr__(self, name):
            raise RuntimeError("connection reset")

    log, other = (LoopLog(Mesh(rank, 2), Gone(), True, print) for rank in range(2))
    other.begin_pass("validation", "loader")
    Ranks(monkeypatch, log, other)
    with pytest.raises(ValueError, match="only rank 1 iterated over loader"):
        log.compare()
