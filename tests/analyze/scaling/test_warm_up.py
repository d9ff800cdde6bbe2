"""The rule that drops the first steps of a run."""

import numpy as np
import pytest

from paceline.analyze.scaling.figures_of_run import find_warm_up


def steps(count, seed=0, **changed):
    times = np.random.default_rng(seed).normal(0.1, 0.002, count)
    for at, factor in changed.get("factors", {}).items():
        times[at] *= factor
    return times


@pytest.mark.parametrize("seed", range(5))
def test_slow_first_steps_are_dropped(seed):
    found = find_warm_up(steps(60, seed, factors={0: 9, 1: 3, 2: 1.6, 3: 1.4, 4: 1.2}))
    assert found.steady
    assert 4 <= found.steps <= 20


@pytest.mark.parametrize("seed", range(5))
def test_fast_first_steps_are_dropped(seed):
    """Of batches that were loaded ahead."""
    found = find_warm_up(steps(60, seed, factors=dict.fromkeys(range(8), 0.4)))
    assert found.steady
    assert 8 <= found.steps <= 20


@pytest.mark.parametrize("seed", range(5))
def test_regular_slow_steps_are_no_warm_up(seed):
    """Of validations: each tenth step."""
    found = find_warm_up(steps(60, seed, factors=dict.fromkeys(range(9, 60, 10), 8)))
    assert found.steps <= 10


def test_a_run_that_speeds_up_until_its_end_is_not_steady():
    assert not find_warm_up(np.linspace(2.0, 1.0, 40)).steady


def test_nothing_is_said_of_few_steps():
    found = find_warm_up([9.0, 1.0, 1.0])
    assert (found.steps, found.steady) == (0, False)
