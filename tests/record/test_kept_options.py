"""Optimizers and schedulers that are restored with the options of the script."""

import copy
from functools import partial

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from paceline.optim.large_batches import scale_learning_rate
from paceline.record.hooks import script_options
from paceline.world import restoring

MAKERS = {
    "none": None,
    "step": partial(schedulers.StepLR, step_size=2),
    "cosine": partial(schedulers.CosineAnnealingLR, T_max=10),
    "lambda": partial(schedulers.LambdaLR, lr_lambda=lambda epoch: 0.9**epoch),
    "restarts": partial(schedulers.CosineAnnealingWarmRestarts, T_0=4),
    "polynomial": partial(schedulers.PolynomialLR, total_iters=12, power=2.0),
    "sequential": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [
            schedulers.LinearLR(optimizer, 0.1, total_iters=5),
            schedulers.ExponentialLR(optimizer, 0.8),
        ],
        [5],
    ),
    "chained": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, 0.5, 4), schedulers.ExponentialLR(optimizer, 0.9)]
    ),
    "one cycle": lambda optimizer: schedulers.OneCycleLR(
        optimizer, max_lr=10 * optimizer.param_groups[0]["lr"], total_steps=12
    ),
    "cyclic": lambda optimizer: schedulers.CyclicLR(
        optimizer, optimizer.param_groups[0]["lr"], 4 * optimizer.param_groups[0]["lr"], 3
    ),
}


@pytest.fixture
def kept(monkeypatch):
    """Install the hooks for a test."""
    for kind in (torch.optim.Optimizer, *vars(schedulers).values()):
        if isinstance(kind, type) and "load_state_dict" in vars(kind):
            monkeypatch.setattr(kind, "load_state_dict", vars(kind)["load_state_dict"])
    add = torch.optim.Optimizer.add_param_group
    monkeypatch.setattr(torch.optim.Optimizer, "add_param_group", add)
    script_options.install(torch.optim)


class Run:
    def __init__(self, maker, lr, **options):
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.weight], lr=lr, **options)
        self.scheduler = maker(self.optimizer) if maker else None

    def steps(self, count):
        """Return the rates of some steps."""
        rates = []
        for _ in range(count):
            rates.append(float(self.optimizer.param_groups[0]["lr"]))
            self.weight.grad = torch.ones(2)
            self.optimizer.step()
            if self.scheduler:
                self.scheduler.step()
        return rates

    def save(self):
        state = [self.optimizer.state_dict(), self.scheduler and self.scheduler.state_dict()]
        return copy.deepcopy(state)

    def load(self, state, scheduler_first=False):
        parts = [self.optimizer, self.scheduler]
        pairs = list(zip(parts, state, strict=True))
        for part, saved in reversed(pairs) if scheduler_first else pairs:
            if part is not None:
                part.load_state_dict(copy.deepcopy(saved))


@pytest.mark.parametrize("first", [False, True], ids=["optimizer first", "scheduler first"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_schedule_continues_with_the_rate_of_the_script(kept, name, first):
    whole = Run(MAKERS[name], 0.2, momentum=0.9)
    rates = whole.steps(11)
    source = Run(MAKERS[name], 0.2, momentum=0.9)
    source.steps(3)
    other = Run(MAKERS[name], 0.05, momentum=0.9)
    other.load(source.save(), first)
    assert other.steps(8) == pytest.approx([rate / 4 for rate in rates[3:]], rel=1e-9)


@pytest.mark.parametrize("name", MAKERS)
def test_equal_options_change_no_bit(kept, name):
    source = Run(MAKERS[name], 0.2, momentum=0.9)
    source.steps(3)
    state = source.save()
    other = Run(MAKERS[name], 0.2, momentum=0.9)
    other.load(state)
    assert repr(other.save()) == repr(state)


def test_all_options_are_those_of_the_script(kept, capfd):
    source = Run(None, 0.2, momentum=0.9, weight_decay=0.1)
    source.steps(3)
    other = Run(None, 0.25, momentum=0.8, weight_decay=0.2)
    other.load(source.save())
    group = other.optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.25, 0.8, 0.2)
    assert other.optimizer.state[other.weight]["momentum_buffer"].tolist() == pytest.approx(
        source.optimizer.state[source.weight]["momentum_buffer"].tolist()
    )
    said = "lr 0.25 instead of 0.2, momentum 0.8 instead of 0.9, weight_decay 0.2 instead of 0.1"
    assert said in capfd.readouterr().err


def test_arguments_of_a_scheduler_are_those_of_the_script(kept):
    source = Run(partial(schedulers.StepLR, step_size=2, gamma=0.1), 0.2)
    source.steps(3)
    other = Run(partial(schedulers.StepLR, step_size=2, gamma=0.5), 0.2)
    other.load(source.save())
    assert other.steps(3) == pytest.approx([0.02, 0.01, 0.01])


def test_state_in_a_group_is_restored(kept):
    """Some optimizers count in their groups what is no argument."""
    source = Run(None, 0.2)
    source.optimizer.param_groups[0]["count"] = 3
    other = Run(None, 0.1)
    other.optimizer.param_groups[0]["count"] = 0
    other.load(source.save())
    assert other.optimizer.param_groups[0]["count"] == 3


def test_a_rate_that_is_a_tensor_remains_one(kept):
    source = Run(None, torch.tensor(0.2), foreach=False)
    other = Run(None, torch.tensor(0.1), foreach=False)
    other.load(source.save())
    rate = other.optimizer.param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor)
    assert rate.item() == pytest.approx(0.1)


class Plateau(schedulers.ReduceLROnPlateau):
    """Reduces the rate after each step."""

    def __init__(self, optimizer, **options):
        super().__init__(optimizer, factor=0.1, patience=0, **options)

    def step(self):
        super().step(1.0)


def test_a_rate_reduced_on_a_plateau_stays_reduced(kept, capfd):
    source = Run(Plateau, 0.1)
    source.steps(4)
    reduced = source.optimizer.param_groups[0]["lr"]
    assert reduced < 0.01
    same, other = Run(Plateau, 0.1), Run(partial(Plateau, min_lr=1e-3), 0.2)
    same.load(source.save())
    assert same.optimizer.param_groups[0]["lr"] == reduced
    assert not capfd.readouterr().err
    other.load(source.save())
    assert other.optimizer.param_groups[0]["lr"] == pytest.approx(2 * reduced)
    assert other.scheduler.min_lrs == [1e-3]
    assert "lr 0.2 instead of 0.1" in capfd.readouterr().err
    third = Run(Plateau, 0.4)  # a child of the child
    third.load(other.save())
    assert third.optimizer.param_groups[0]["lr"] == pytest.approx(4 * reduced)


def test_a_rate_changed_in_place_stays_changed(kept):
    source = Run(None, 0.2)
    source.optimizer.param_groups[0]["lr"] *= 0.1
    for own, expected in ((0.2, 0.02), (0.4, 0.04)):
        other = Run(None, own)
        other.load(source.save())
        assert other.optimizer.param_groups[0]["lr"] == pytest.approx(expected)


@pytest.mark.parametrize("own", [0.1, 0.3])
def test_a_rate_that_is_set_after_construction_is_that_of_the_script(kept, own):
    source, other = Run(None, 0.1), Run(None, 0.1)
    source.optimizer.param_groups[0]["lr"] = 0.2
    other.optimizer.param_groups[0]["lr"] = own + 0.01
    other.load(source.save())
    assert other.optimizer.param_groups[0]["lr"] == pytest.approx(own + 0.01)


def test_a_checkpoint_without_its_first_rate_keeps_its_rate(kept, capfd):
    state = Run(None, 0.2).save()
    del state[0]["param_groups"][0][script_options.FIRST_RATE]
    other = Run(None, 0.3)
    other.load(state)
    assert other.optimizer.param_groups[0]["lr"] == 0.2
    assert "with lr 0.2, and not with lr 0.3 of this trial" in capfd.readouterr().err
    later = Run(None, 0.6)
    later.load(other.save())
    assert later.optimizer.param_groups[0]["lr"] == pytest.approx(0.4)


def test_a_scheduler_takes_a_rate_that_was_scaled_after_construction(kept):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.param_groups[0]["lr"] *= 4
    assert MAKERS["lambda"](optimizer).base_lrs == [0.4]


@pytest.mark.parametrize("scale", [1, 4])
@pytest.mark.parametrize("own", [0.1, 0.2])
@pytest.mark.parametrize("name", ["lambda", "step", "cosine", "polynomial", "one cycle"])
def test_a_scheduler_that_is_made_after_loading_has_the_rate_of_the_script(kept, name, own, scale):
    def run(lr, state=None):
        found = Run(None, lr)
        found.optimizer.param_groups[0]["lr"] *= scale
        peak = 10 * scale * lr
        if state:
            found.optimizer.load_state_dict(copy.deepcopy(state[0]))
        found.scheduler = (
            schedulers.OneCycleLR(found.optimizer, peak, total_steps=12)
            if name == "one cycle"
            else MAKERS[name](found.optimizer)
        )
        if state:
            found.scheduler.load_state_dict(copy.deepcopy(state[1]))
        return found

    source = run(0.1)
    source.steps(3)
    other, same = run(own, source.save()), run(0.1, source.save())
    base = source.scheduler.base_lrs[0]
    assert other.scheduler.base_lrs == pytest.approx([base * own / 0.1])
    assert same.scheduler.base_lrs == [base]
    expected = [rate * own / 0.1 for rate in same.steps(5)]
    assert other.steps(5) == pytest.approx(expected, rel=1e-9)


def test_a_rate_scaled_by_the_world_size_stays_reduced(kept):
    def run(lr):
        found = Run(None, lr)
        scale_learning_rate(found.optimizer, reference_batch=8, global_batch=32)
        return found

    source = run(0.1)
    source.optimizer.param_groups[0]["lr"] *= 0.1
    for own, expected in ((0.1, 0.04), (0.2, 0.08)):
        other = run(own)
        other.load(source.save())
        assert other.optimizer.param_groups[0]["lr"] == pytest.approx(expected)


def test_the_first_rate_is_no_option_of_another_optimizer(kept):
    """A checkpoint of a trial is loaded by a newer PyTorch, without the hooks."""
    state, optimizer = Run(None, 0.1).save()[0], Run(None, 0.1).optimizer
    del optimizer.param_groups[0][script_options.FIRST_RATE]
    del state["param_groups"][0]["nesterov"]
    assert not restoring._optimizer_difference(optimizer, [[(2,)]], state)
