"""A schedule and a number of micro-batches are chosen by measured steps, alike on all ranks."""

import copy

import pytest
import thread_ranks
import torch
from torch import nn

from paceline import Layout
from paceline.parallel.pipeline.execution.schedules import Candidate, ScheduleChoice, candidates_for


def test_candidates_fit_the_batch_and_the_model():
    both = {"can_split": True, "may_differ": True}
    found = candidates_for(2, None, 64, **both)
    assert found[0] == Candidate("zero-bubble", 16)
    assert set(found) == {
        *(Candidate("1f1b", n) for n in (8, 16)),
        *(Candidate("zero-bubble", n) for n in (8, 16)),
    }
    assert {one.micro_batches for one in candidates_for(2, None, 12, **both)} == {8}
    assert {one.micro_batches for one in candidates_for(2, 4, 64, **both)} == {4}
    plain = candidates_for(2, None, 64, can_split=False, may_differ=False)
    assert plain == [Candidate("1f1b", 8)]


def test_the_shortest_median_is_chosen_and_other_batches_are_not_compared():
    fast, slow = Candidate("1f1b", 8), Candidate("zero-bubble", 8)
    choice = ScheduleChoice([slow, fast], 16)
    before, lines, order = 0, [], []
    for step in range(10):
        one = choice.next()
        order.append(one)
        samples = 3 if step == 5 else 16  # of the step before
        if line := choice.begin(1 if step == 5 else before, samples):
            lines.append(line)
        before = 1_000_000 * (50 if step < 2 else {fast: 10, slow: 20}[one])
    assert order[:8] == [slow, fast] * 4
    assert order[9] == choice.chosen == fast
    assert lines == [
        "pipeline: schedule=1f1b + micro-batches=8, the fastest of the measured ones: "
        "schedule=zero-bubble + micro-batches=8 20 ms, schedule=1f1b + micro-batches=8 10 ms"
    ]
    assert ScheduleChoice([fast], 16).chosen == fast


def test_a_training_that_chooses_equals_one_process():
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    one = copy.deepcopy(plain)
    alone = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
    for _ in range(20):
        nn.functional.mse_loss(one(inputs), inputs).backward()
        alone.step()
        alone.zero_grad()
    said = [[], []]

    def train(world):
        model = copy.deepcopy(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        world._progress.say_once = said[world.rank].append
        model, optimizer = world.distribute(model, optimizer, layout="pp2 + schedule=auto")
        for _ in range(20):
            world.forward_backward(model, inputs, inputs, loss=nn.functional.mse_loss)
            world.step(optimizer)
        for name, parameter in model.module.named_parameters():
            torch.testing.assert_close(parameter, one.get_parameter(name), rtol=1e-4, atol=1e-6)
        return world._training.models[-1]._choice.chosen

    first, second = thread_ranks.run(train)
    assert first == second
    assert first is not None
    assert sum("the fastest of the measured ones" in line for line in said[0]) == 1


def test_auto_is_a_schedule_of_pipelines_only():
    assert Layout.parse("pp2 + schedule=auto").schedule == "auto"
    with pytest.raises(ValueError, match="schedule needs pipeline stages"):
        Layout.parse("data + schedule=auto")
