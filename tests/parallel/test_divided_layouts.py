"""Trainings whose ranks share samples and hold parts of a model, on threads and with toy layouts.

Each equals one process: losses, meters, clipping, accumulation, uneven last batches.
"""

import pytest
import thread_ranks
import torch
import toy_layouts
from torch import nn
from torch.nn import functional
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader, TensorDataset

from paceline.optim import LARS

LAYOUTS = {"pp2": 2, "tp2": 2, "pp2 x dp2": 4, "dp2 x tp2": 4, "pp2 x zero2": 4}


@pytest.fixture(autouse=True)
def _installed():
    toy_layouts.install()
    yield
    toy_layouts.uninstall()


def two_parts(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh()),
        nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 2)),
    )


def weighted(outputs, targets):
    each = functional.cross_entropy(outputs, targets, reduction="none")
    weight = 1.0 + 2.0 * targets
    return (each * weight).sum(), weight.sum()


def batches(world, samples=22):
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(samples, 4, generator=generator), torch.arange(samples) % 2)
    return world.batches(world.shard(DataLoader(data, shuffle=True), global_batch=4))


def whole(model):
    """Return this rank's parameters by name, whole ones of DTensors."""
    named = (
        (n.removeprefix("stage.").removeprefix("module."), p) for n, p in model.named_parameters()
    )
    return {n: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for n, p in named}


def merged(found):
    """Return the parameters of all ranks; copies are equal."""
    together = {}
    for of_rank in found:
        for name, value in of_rank.items():
            torch.testing.assert_close(value, together.setdefault(name, value), rtol=0, atol=0)
    return dict(sorted(together.items()))


def train(world, layout, accumulate=1, clip=None, loss=functional.cross_entropy):
    model = two_parts(1 + world.rank)  # rank 0's parameters are those of all
    groups = [
        {"params": [*model[1].parameters()], "lr": 0.05},
        {"params": [*model[0].parameters()]},
    ]
    optimizer = torch.optim.Adam(groups, lr=0.02)
    model, optimizer = world.distribute(model, optimizer, layout=layout, accumulate=accumulate)
    meter = world.meter()
    for x, y in batches(world):
        mean = world.forward_backward(model, x, y, loss=loss)
        meter.add(loss=mean * len(y), count=len(y))
        world.step(optimizer, clip=clip)
    return whole(model), meter.sum("loss", "count")


CASES = {
    "plain": {},
    "accumulated": {"accumulate": 4},
    "clipped": {"clip": 0.1},
    "weighted": {"loss": weighted, "accumulate": 2},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_one_process(layout, case):
    more = CASES[case]
    expected, sums = thread_ranks.alone(lambda w: train(w, "data", **more), seed=3)
    found = thread_ranks.run(lambda w: train(w, layout, **more), LAYOUTS[layout], seed=3)
    together = merged([one for one, _ in found])
    assert together.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(together[name], value, rtol=1e-4, atol=1e-6)
    assert len({one for _, one in found}) == 1
    assert found[0][1][1] == 22
    if case != "weighted":
        assert found[0][1] == pytest.approx(sums, rel=1e-5)


@pytest.mark.parametrize("call", ["forward_backward", "backward"])
@pytest.mark.parametrize("layout", ["h2", "h2 x dp2"])
def test_parts_of_samples_equal_one_process(layout, call):
    def train(world, layout):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        model, optimizer = world.distribute(model, optimizer, layout=layout)
        generator = torch.Generator().manual_seed(5)
        data = TensorDataset(torch.randn(10, 6, 4, generator=generator), torch.arange(10.0))
        target = functional.mse_loss
        losses = []
        for x, y in world.batches(world.shard(DataLoader(data, shuffle=True), global_batch=4)):
            wanted = y[:, None, None].expand(-1, x.shape[1], 2)
            if call == "backward":
                loss = target(model(x), wanted)
                world.backward(loss)
            else:
                loss = world.forward_backward(model, x, wanted, loss=target)
                losses.append(world.mean(loss * len(y), len(y)))
            world.step(optimizer, clip=1.0)
        validation = world.shard(DataLoader(data, batch_size=3), every_sample_once=True)
        meter = world.meter()
        for x, y in world.batches(validation):
            meter.add(loss=(model(x).mean((1, 2)) - y).square().sum(), count=len(y))
        return whole(model), [*losses, *meter.sum("loss", "count")]

    expected, losses = thread_ranks.alone(lambda w: train(w, "data"))
    ranks = 2 if layout == "h2" else 4
    for state, found in thread_ranks.run(lambda w: train(w, layout), ranks):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


def test_optimizer_may_hold_parameters_of_other_ranks_only():
    """The first stage is frozen, and takes part in clipping, schedulers and the steps' order."""

    def train(world, layout):
        models = []
        for every in (1, 2):
            model = two_parts()
            model[0].requires_grad_(every == 1)
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(trained, lr=0.1)
            how = {"layout": layout, "accumulate": every}
            models.append(world.distribute(model, optimizer, **how))
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for _, o in models]
        for x, y in batches(world, 14):
            for model, _ in models:
                world.forward_backward(model, x, y, loss=functional.cross_entropy)
            for (_, optimizer), scheduler in zip(models, schedulers, strict=True):
                if world.step(optimizer, clip=0.2):
                    scheduler.step()
        rates = [one.get_last_lr() for one in schedulers]
        return [whole(model) for model, _ in models], rates

    expected, rates = thread_ranks.alone(lambda w: train(w, "data"))
    found = thread_ranks.run(lambda w: train(w, "pp2"), 2)
    for number, of_model in enumerate(expected):
        together = merged([one[number] for one, _ in found])
        for name, value in of_model.items():
            torch.testing.assert_close(together[name], value, rtol=1e-4, atol=1e-6)
    assert [own for _, own in found] == [rates, rates]


def test_step_without_a_backward_is_an_error_on_all_ranks():
    def step(world):
        model = two_parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.distribute(model, optimizer, layout="pp2")
        world.step(optimizer)

    found = thread_ranks.run(step, 2, outcomes=True)
    for error in found:
        assert "no parameter of the SGD has a gradient" in str(error)


def test_sums_are_equal_on_ranks_that_share_samples():
    """Ranks may differ in rounding, and a script may decide by the sums."""

    def summed(world):
        world.distribute(two_parts(), layout="tp2")
        meter = world.meter()
        meter.add(loss=1.0 + 1e-12 * world.rank, count=1)
        return meter.sum("loss", "count"), world.mean(0.1 + 1e-12 * world.rank, 1)

    found = thread_ranks.run(summed, 4)
    assert len(set(found)) == 1
    assert found[0][0][1] == 2


@pytest.mark.parametrize("layout", ["tp2", "dp2 x tp2", "h2 x dp2"])
def test_copies_that_diverge_are_named(layout):
    def train(world):
        plain = two_parts()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        model, optimizer = world.distribute(plain, optimizer, layout=layout)
        for _ in world.epochs(2):
            for _ in range(2):
                x, y = torch.ones(2, 6, 4), torch.ones(2, 6, 2)
                x, y = world._training.place_batch([x, y])
                loss = functional.mse_loss
                world.forward_backward(model, x, y[:, : x.shape[1]], loss=loss)
                world.step(optimizer)
            if world.rank == 1:
                plain[1][1].weight.data.add_(1)

    axis = "height" if "h2" in layout else "tensor"
    for error in thread_ranks.run(train, LAYOUTS.get(layout, 4), outcomes=True):
        assert f"rank 1 (data 0, {axis} 1)'s parameters differ from" in str(error)
        assert "first in 1.1.weight" in str(error)


def test_norm_of_a_part_is_refused():
    def clip(world):
        model = two_parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.distribute(model, optimizer, layout="pp2")
        x = torch.ones(2, 4)
        world.forward_backward(model, x, torch.tensor([0, 1]), loss=functional.cross_entropy)
        with pytest.raises(ValueError, match="the layout divides the model"):
            get_total_norm([p.grad for p in model.parameters()])  # imported before
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    for error in thread_ranks.run(clip, 2, outcomes=True):
        assert "clip_grad_norm_: the layout divides the model" in str(error)
        assert "HINT: world.step(optimizer, clip=1.0)" in str(error)
    own = nn.Linear(2, 2)
    own(torch.ones(1, 2)).sum().backward()
    nn.utils.clip_grad_norm_(own.parameters(), 1.0)


def test_blocks_that_other_ranks_have_may_be_named():
    def train(world, layout, **more):
        model = two_parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names = ["1.0", "0.0"]
        more |= {"recompute": "blocks", "recomputed_blocks": names}
        more |= {"blocks": names} if "zero" in layout else {}
        model, optimizer = world.distribute(model, optimizer, layout=layout, **more)
        for x, y in batches(world):
            world.forward_backward(model, x, y, loss=functional.cross_entropy)
            world.step(optimizer)
        return whole(model)

    expected = thread_ranks.alone(lambda w: train(w, "data"))
    found = merged(thread_ranks.run(lambda w: train(w, "pp2 x zero3"), 4))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    unknown = {"recomputed_blocks": ["1.9"]}
    for error in thread_ranks.run(
        lambda w: w.distribute(two_parts(), layout="pp2", recompute="blocks", **unknown),
        2,
        outcomes=True,
    ):
        assert "recomputed_blocks contains '1.9'" in str(error)


def test_hooks_of_a_strategy_are_not_lost():
    def distribute(world):
        world.distribute(two_parts(), layout="h2 x zero3")

    for error in thread_ranks.run(distribute, 4, outcomes=True):
        assert "the parameter 0.0.weight has a hook on its gradient" in str(error)


def test_export_of_a_part_is_refused(tmp_path):
    def export(world):
        model = world.distribute(two_parts(), layout="pp2")
        world.export(model, tmp_path / "model", inputs="x: float32[batch,4]")

    for error in thread_ranks.run(export, 2, outcomes=True):
        assert "world.export: the layout divides the model" in str(error)


class NormalizedSGD(torch.optim.SGD):
    """Divides the gradients by the norm of all of them."""

    @torch.no_grad()
    def step(self):
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        for parameter in trained:
            parameter.sub_(parameter.grad / norm, alpha=self.defaults["lr"])


@pytest.mark.parametrize(
    ("kind", "layout", "needs"),
    [
        *((torch.optim.LBFGS, "pp2", "all parameters"), (NormalizedSGD, "pp2", "all parameters")),
        (torch.optim.Adafactor, "tp2", "whole par"),
    ],
)
def test_optimizer_that_needs_more_than_a_part_is_refused(kind, layout, needs):
    def distribute(world):
        model = two_parts()
        world.distribute(model, kind(model.parameters()), layout=layout)

    for error in thread_ranks.run(distribute, 2, outcomes=True):
        assert f"the step of {kind.__name__} needs {needs}" in str(error)


def test_norms_of_layers_are_right_on_sharded_tensors():
    def train(world, layout):
        model = two_parts()
        optimizer = LARS(model.parameters(), lr=0.5)
        model, optimizer = world.distribute(model, optimizer, layout=layout)
        for x, y in batches(world):
            world.forward_backward(model, x, y, loss=functional.cross_entropy)
            world.step(optimizer)
        return whole(model)

    expected = thread_ranks.alone(lambda w: train(w, "data"))
    found = merged(thread_ranks.run(lambda w: train(w, "tp2"), 2))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


class Scaler(torch.amp.GradScaler):
    """Its scale is 8, and every update without an infinite gradient doubles it."""

    def __init__(self, device):
        super().__init__(device, init_scale=8.0, growth_interval=1)


@pytest.mark.parametrize("layout", ["pp2", "tp2", "pp2 x dp2"])
def test_all_ranks_skip_a_step_with_an_infinite_gradient_on_one(monkeypatch, layout):
    monkeypatch.setattr("paceline.world.autocast_dtype", lambda *_: torch.float16)
    monkeypatch.setattr(torch.amp, "GradScaler", Scaler)

    def train(world, layout):
        model = two_parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.distribute(model, optimizer, layout=layout)
        steps = []
        for number, (x, y) in enumerate(batches(world, 16)):
            world.forward_backward(model, x, y, loss=functional.cross_entropy)
            for name, parameter in model.named_parameters():
                if number == 1 and name.endswith("0.0.bias") and parameter.grad is not None:
                    getattr(parameter.grad, "_local_tensor", parameter.grad)[0] = torch.inf
            steps.append((world.step(optimizer), world._training.scaler.get_scale()))
        return whole(model), steps

    expected, steps = thread_ranks.alone(lambda w: train(w, "data"), precision="fp16")
    assert [has for has, _ in steps] == [True, False, True, True]
    found = thread_ranks.run(lambda w: train(w, layout), LAYOUTS[layout], precision="fp16")
    for _, of_rank in found:
        assert [has for has, _ in of_rank] == [has for has, _ in steps]
        assert len({tuple(one) for _, one in found}) == 1
    together = merged([one for one, _ in found])
    for name, value in expected.items():
        torch.testing.assert_close(together[name], value, rtol=2e-2, atol=2e-3)
