"""Schedules: complete, without deadlocks, and with the idle time of the formula."""

import pytest
import torch
from torch import nn

from paceline.cost.layout import chunks_of, idle_share
from paceline.parallel.pipeline.execution.schedules import SCHEDULES
from paceline.parallel.pipeline.executor import SplitBackward

# time of a computation: a backward takes two forwards
TIMES = {"F": 1, "B": 2, "I": 1, "W": 1}


def play(name, stages, count):
    """Run the schedule of all ranks with these times; return when each computation has ended."""
    virtual = stages * chunks_of(name)
    rest = {rank: list(SCHEDULES[name](rank, stages, count)) for rank in range(stages)}
    ended, free = {}, dict.fromkeys(rest, 0)
    while any(rest.values()):
        progress = False
        for rank, actions in rest.items():
            while actions:
                kind, chunk, m = actions[0]
                stage = rank + stages * chunk
                needed = {
                    "F": [("F", stage - 1, m)] if stage else [],
                    "W": [("I", stage, m)],
                }.get(kind, [("F", stage, m), (kind, stage + 1, m)])
                if kind in "BI" and stage == virtual - 1:
                    needed = [("F", stage, m)]
                if any(one not in ended for one in needed):
                    break
                start = max([free[rank], *(ended[one] for one in needed)])
                free[rank] = ended[kind, stage, m] = start + TIMES[kind] / chunks_of(name)
                actions.pop(0)
                progress = True
        assert progress, f"deadlock: {rest}"
    return ended, max(free.values())


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 16])
def test_schedule_is_complete_and_can_not_deadlock(name, stages, count):
    ended, _ = play(name, stages, count)
    kinds = "FIW" if name == "zero-bubble" else "FB"
    places = range(stages * chunks_of(name))
    assert ended.keys() == {(k, s, m) for k in kinds for s in places for m in range(count)}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("count", [4, 8, 16])
def test_idle_share_is_that_of_the_formula(name, stages, count):
    _, length = play(name, stages, count)
    assert 1 - count * 3 / length == pytest.approx(idle_share(name, stages, count), abs=1e-9)


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (2, 8), (4, 8), (4, 16)])
def test_zero_bubble_is_shorter_than_1f1b(stages, count):
    _, length = play("zero-bubble", stages, count)
    assert length < play("1f1b", stages, count)[1]
    assert 1 - count * 3 / length == pytest.approx(idle_share("zero-bubble", stages, count))


@pytest.mark.parametrize("stages", [2, 4])
def test_1f1b_and_zero_bubble_hold_as_many_micro_batches_as_stages(stages):
    for name in ("1f1b", "zero-bubble"):
        held = most = 0
        for kind, _, _ in SCHEDULES[name](0, stages, 16):
            held += {"F": 1, "B": -1, "W": -1, "I": 0}[kind]
            most = max(most, held)
        assert most <= stages


def test_a_backward_in_two_parts_of_an_output_that_computes_another_one():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    parameters = [*first.parameters(), *second.parameters()]
    leaf = torch.randn(2, 3, requires_grad=True)
    sent = first(leaf).relu()
    outputs, gradients = [sent, second(sent)], [torch.randn(2, 3), torch.randn(2, 3)]
    wanted = torch.autograd.grad(outputs, [leaf, *parameters], gradients, retain_graph=True)
    split = SplitBackward(outputs, gradients, [leaf])
    split.of_inputs(iter(parameters))
    assert all(one.grad is None for one in parameters)
    split.of_parameters(iter(parameters))
    torch.testing.assert_close([leaf.grad, *(one.grad for one in parameters)], list(wanted))
