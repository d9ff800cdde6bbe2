"""What a training loop does: iterations, evaluations, samples and steps, from notes alone."""

import pytest

from paceline.record.loop.iterations import TrainingLoop
from paceline.record.ring.states import State


class Model:
    pass


class Script:
    """A script's calls, each of which takes 10 ns, and what the loop makes of them."""

    def __init__(self):
        self.at, self.samples, self.steps = 0, 0, []
        self.events = []
        self.loop = TrainingLoop(self, count_samples=len)
        self.model, self.optimizer = Model(), Model()
        self.iterators = {}

    def event(self, state, start, end):
        self.events.append((State(state), start, end))

    def tick(self):
        self.at += 10
        return self.at - 10, self.at

    def open(self, loader):
        start, _ = self.tick()
        self.iterators[loader] = iterator = 100 + len(loader)
        self.loop.iterator_made(iterator, start)

    def fetch(self, loader, samples=8):
        if loader not in self.iterators:
            self.open(loader)
        start, _ = self.tick()
        iterator_start = self.loop.fetch_begins(self.iterators[loader], start)
        self.loop.fetched(self.iterators[loader], start, iterator_start, samples)

    def exhaust(self, loader):
        start, _ = self.tick()
        iterator = self.iterators.pop(loader)
        self.loop.exhausted(iterator, self.loop.fetch_begins(iterator, start))

    def forward(self, grad=True, training=True, inputs=(), model=None):
        start, end = self.tick()
        model = model or self.model
        if grad:
            self.loop.training_forward(model, training, start, end, inputs)
        else:
            self.loop.other_forward(model, training, start, end)

    def backward(self, accumulates=True):
        start, end = self.tick()
        self.loop.backward_begins(start)
        self.loop.backward_ends(start, end, accumulates)

    def step(self, optimizer=None, was_skipped=False):
        start, end = self.tick()
        if self.loop.step(optimizer or self.optimizer, start, end, was_skipped):
            self.steps.append(self.samples)
            self.samples = 0

    def train(self, loader="train"):
        self.fetch(loader)
        self.forward()
        self.backward()
        self.step()

    def count(self, state):
        return sum(event[0] == state for event in self.events)

    def time_in(self, state):
        return sum(end - start for what, start, end in self.events if what == state)


@pytest.fixture
def script():
    return Script()


def test_each_step_has_the_samples_of_its_batches(script):
    for _ in range(3):
        script.train()
    script.exhaust("train")
    for _ in range(2):  # two batches a step
        script.fetch("train")
        script.forward()
        script.backward()
        script.fetch("train")
        script.forward()
        script.backward()
        script.step()
    assert script.steps == [8, 8, 8, 16, 16]


def test_outputs_cached_without_gradient_in_training_mode_are_training(script):
    """As open_clip with --accum-freq 2: all batches without gradient first, then again with it."""
    for _ in range(3):
        for _ in range(2):
            script.fetch("train")
            script.forward(grad=False)
        for _ in range(2):
            script.forward()
            script.backward()
        script.step()
    script.exhaust("train")
    script.loop.end(script.at)
    assert script.steps == [16, 16, 16]
    assert script.count(State.VALIDATION) == 0
    assert script.count(State.FORWARD) == 12


def test_loop_without_gradient_in_training_mode_is_evaluation_if_no_backward_follows(script):
    script.train()
    for _ in range(3):
        script.fetch("held out")
        script.forward(grad=False)
    script.exhaust("held out")
    script.train()
    script.loop.end(script.at)
    assert script.count(State.VALIDATION) == 3
    assert script.steps == [8, 8]


def test_long_loop_without_gradient_is_evaluation_before_it_ends(script):
    for _ in range(40):
        script.fetch("held out")
        script.forward(grad=False)
    assert script.count(State.VALIDATION) >= 20
    script.loop.end(script.at)
    assert script.count(State.VALIDATION) == 40


def test_loop_without_gradient_that_is_left_early_ends_when_training_goes_on(script):
    script.train()
    script.exhaust("train")
    for _ in range(2):
        script.fetch("held out")
        script.forward(grad=False)
    script.train()
    script.loop.end(script.at)
    assert script.count(State.VALIDATION) == 2
    assert script.steps == [8, 8]


def test_forward_in_eval_mode_is_evaluation_and_teacher_is_not(script):
    script.train()
    script.fetch("held out")
    script.forward(grad=False, training=False)
    script.exhaust("held out")
    assert script.count(State.VALIDATION) == 1
    script.fetch("train")
    script.forward(grad=False, training=False, model=Model())
    script.forward()
    script.backward()
    script.step()
    script.loop.end(script.at)
    assert script.count(State.VALIDATION) == 1
    assert script.steps == [8, 8]


@pytest.mark.parametrize("ahead", [1, 2])
def test_batches_that_are_fetched_ahead_count_in_the_step_that_trains_them(script, ahead):
    for _ in range(2):  # epochs of six batches
        for _ in range(ahead):
            script.fetch("train")
        for batch in range(6):
            if batch < 6 - ahead:
                script.fetch("train", samples=8 if batch + ahead < 5 else 3)
            elif batch == 6 - ahead:
                script.exhaust("train")
            script.forward()
            script.backward()
            script.step()
    # The first step ever counts what was fetched before it: the window begins after it.
    assert script.steps[1:] == [8, 8, 8, 8, 3, 8, 8, 8, 8, 8, 3]


def test_fewer_batches_in_the_second_step_without_prefetching(script):
    for _ in range(2):
        for batches in (4, 2, 2):
            for _ in range(batches):
                script.fetch("train")
                script.forward()
                script.backward()
            script.step()
        script.exhaust("train")
    assert script.steps == [32, 16, 16, 32, 16, 16]


def test_inputs_of_the_model_count_without_a_loader(script):
    for _ in range(3):
        script.forward(inputs="12345")
        script.backward()
        script.step()
    assert script.steps == [5, 5, 5]
    assert script.count(State.GAP) == 2


def test_training_by_autograd_grad_counts_each_step_after_an_early_backward(script):
    script.forward()
    script.backward()  # a check before the training
    for _ in range(51):
        script.forward()
        script.backward(accumulates=False)
        script.step()
    assert len(script.steps) == 51


def test_steps_without_any_backward_count(script):
    script.train()
    for _ in range(5):  # gradients that the script computes by itself
        script.step()
    assert len(script.steps) == 6


def test_optimizers_for_groups_of_parameters_are_one_step(script):
    others = [Model(), Model()]
    for _ in range(4):
        script.fetch("train")
        script.forward()
        script.backward()
        for optimizer in (script.optimizer, *others):
            script.step(optimizer)
    assert script.steps == [8, 8, 8, 8]


def test_alternating_optimizers_count_once_and_a_new_one_takes_over(script):
    other = Model()
    for _ in range(3):
        script.fetch("train")
        for optimizer in (script.optimizer, other):
            script.forward()
            script.backward()
            script.step(optimizer)
    assert script.steps == [8, 8, 8]
    for _ in range(3):  # the first optimizer is not used any more
        script.fetch("train")
        script.forward()
        script.backward()
        script.step(other)
    assert len(script.steps) == 6


def test_skipped_step_adds_its_samples_to_the_next_one(script):
    script.train()
    script.fetch("train")
    script.forward()
    script.backward()
    script.step(was_skipped=True)
    script.train()
    assert script.steps == [8, 16]


def test_models_and_optimizers_are_not_kept_alive(script):
    import weakref

    script.train()
    model, optimizer = weakref.ref(script.model), weakref.ref(script.optimizer)
    del script.model, script.optimizer
    assert model() is None
    assert optimizer() is None
