"""The hooks of a training loop, called as torch calls them, in this process."""

import gc
import threading
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from paceline.analyze.records.read_record import parse_record
from paceline.record.hooks import taps
from paceline.record.hooks.torch_patches import recorded_unless_busy
from paceline.record.hooks.training_loop import LoopRecorder
from paceline.record.ring.recorder import Recorder
from paceline.record.ring.states import State


class Loop:
    """A script whose calls pass through the hooks."""

    def __init__(self, folder):
        self.recorder = Recorder(0, 1, folder=folder)
        self.hooks = LoopRecorder(self.recorder)

    def batches(self, loader, size=8):
        """Yield batches of a list as a DataLoader's iterator gives them."""
        iterator = self.hooks.open(iter, loader)
        while True:
            try:
                yield self.hooks.fetch(next, iterator)
            except StopIteration:
                return

    def optimizer(self, model, kind=torch.optim.SGD, **options):
        made = kind(model.parameters(), lr=0.1, **options)
        made.register_step_pre_hook(self.hooks.before_step)
        made.register_step_post_hook(self.hooks.after_step)
        return made

    def call(self, model, x):
        return self.hooks.forward(model, nn.Module.__call__, (x,), {})

    def train(self, model, optimizer, x=None):
        self.call(model, torch.ones(8, 2) if x is None else x).sum().backward()
        optimizer.step()

    def events(self, state):
        return parse_record(self.recorder.snapshot()).events_in(state)

    @property
    def samples(self):
        return self.events(State.STEP)["amount"].tolist()


@pytest.fixture
def loop(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", torch.autograd._engine_run_backward)
    loop = Loop(tmp_path)
    taps.BACKWARD.wrap(partial(recorded_unless_busy, loop.hooks, loop.hooks.backward))
    return loop


class OutOfMemoryError(RuntimeError):
    pass


class Fails(torch.optim.SGD):
    """An optimizer whose step fails once."""

    failures = 1

    def step(self, closure=None):
        if self.failures:
            self.failures -= 1
            raise OutOfMemoryError
        return super().step(closure)


def test_step_that_raises_does_not_end_recording_or_keep_the_optimizer(loop):
    model = nn.Linear(2, 2)
    failing = loop.optimizer(model, Fails)
    with pytest.raises(OutOfMemoryError):
        loop.train(model, failing)
    alive = weakref.ref(failing)
    del failing
    gc.collect()
    assert alive() is None
    kept = loop.optimizer(model, Fails)
    with pytest.raises(OutOfMemoryError):
        loop.train(model, kept)
    optimizer = loop.optimizer(model)  # made anew, while the one that failed is still there
    for _ in range(5):
        loop.train(model, optimizer)
    assert len(loop.samples) == 5


def test_optimizer_inside_the_step_of_another_one_is_not_a_step(loop):
    model = nn.Linear(2, 2)
    inner = loop.optimizer(model)

    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            return inner.step()

    outer = loop.optimizer(model, Outer)
    for _ in range(4):
        loop.train(model, outer)
    assert len(loop.samples) == 4


def test_skipped_step_of_a_fused_optimizer_with_a_gradient_scaler_does_not_count(loop):
    model = nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    optimizer = loop.optimizer(model, torch.optim.SGD, fused=True)
    for factor in (1.0, float("inf"), 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale(loop.call(model, torch.ones(8, 2)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert len(loop.samples) == 3


def test_early_backward_does_not_hide_a_training_by_autograd_grad(loop):
    model = nn.Linear(2, 2)
    optimizer = loop.optimizer(model)
    loop.call(model, torch.ones(8, 2)).sum().backward()
    for _ in range(51):
        loss = loop.call(model, torch.ones(8, 2)).sum()
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()
    assert len(loop.samples) == 51


def test_batches_cached_without_gradient_in_training_mode_are_trained(loop):
    model = nn.Linear(2, 2)
    optimizer = loop.optimizer(model)
    kept = []
    for x in loop.batches([torch.randn(8, 2) for _ in range(8)]):
        with torch.no_grad():
            loop.call(model, x)
        kept.append(x)
        if len(kept) == 2:
            for cached in kept:
                loop.call(model, cached).sum().backward()
            optimizer.step()
            kept.clear()
    loop.hooks.end()
    assert loop.samples == [16] * 4
    assert not len(loop.events(State.VALIDATION))


def test_batch_that_is_fetched_ahead_counts_in_its_own_step(loop):
    model = nn.Linear(2, 2)
    optimizer = loop.optimizer(model)
    iterator = loop.batches([torch.randn(8, 2) for _ in range(6)])
    following = next(iterator)
    while following is not None:
        x, following = following, next(iterator, None)
        loop.train(model, optimizer, x)
    assert loop.samples[1:] == [8] * 5


def test_module_without_parameters_does_not_fail(loop):
    model = nn.Sequential(nn.Linear(2, 2))
    loop.train(model, loop.optimizer(model))
    model[0] = nn.ReLU()
    model.eval()
    with torch.no_grad():
        assert loop.call(model, torch.ones(8, 2)).shape == (8, 2)
    assert loop.call(model, torch.ones(8, 2)).shape == (8, 2)


@pytest.fixture
def no_failures(monkeypatch):
    """Forget the failures of hooks that a test causes; return what is said."""
    from paceline.record.hooks import hook_failures

    said = []
    monkeypatch.setattr(hook_failures, "notify", said.append)
    yield said
    hook_failures.failed_hooks.clear()


def test_failure_of_a_hook_is_said_once_and_the_script_goes_on(loop, no_failures, monkeypatch):
    model = nn.Linear(2, 2)
    optimizer = loop.optimizer(model)
    for name in ("fetched", "training_forward", "backward_begins", "step"):
        monkeypatch.setattr(loop.hooks._loop, name, lambda *_, name=name: {}[name])
    for x in loop.batches([torch.ones(8, 2)] * 3):
        loop.train(model, optimizer, x)
    assert len(no_failures) == 4
    assert "the optimizer step" in no_failures[-1]
    assert "KeyError: 'step'" in no_failures[-1]
    record = parse_record(loop.recorder.snapshot())
    assert set(record.meta["failed_hooks"]) > {"the backward", "the model's forward"}


def test_exceptions_of_the_script_pass_unchanged(loop, no_failures):
    class Raises(nn.Linear):
        def forward(self, x):
            raise OutOfMemoryError

    with pytest.raises(OutOfMemoryError) as caught:
        loop.call(Raises(2, 2), torch.ones(1, 2))
    assert caught.value.__context__ is None

    def fails(_):
        raise OutOfMemoryError

    with pytest.raises(OutOfMemoryError):
        loop.hooks.fetch(fails, iter([]))
    assert not no_failures
    assert not loop.hooks.busy


def test_optimizer_in_another_thread_does_not_take_over_at_once(loop):
    """Averaged weights, an asynchronous controller: a step now and then beside the training."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, beside = loop.optimizer(model), loop.optimizer(other)
    for step in range(6):
        loop.train(model, optimizer)
        if step == 2:
            thread = threading.Thread(target=beside.step)
            thread.start()
            thread.join()
    assert len(loop.samples) == 6
    assert loop.recorder.training_thread == threading.get_ident()
