"""Decisions about noise are wrong at most in the share of cases that they state."""

import math

import numpy as np
import pytest

from paceline.significance import (
    SharedLevel,
    half_width,
    is_slowest,
    range_by_chance,
    rank_spread,
    student_quantile,
    tail_of_look,
)


@pytest.mark.parametrize(
    ("tail", "degrees", "published"),
    [
        *((0.05, 1, 6.314), (0.05, 2, 2.920), (0.025, 9, 2.262), (0.005, 7, 3.499)),
        *((0.001, 4, 7.173), (0.0005, 10, 4.587), (0.05, 120, 1.658)),
    ],
)
def test_quantiles_of_student_t_match_published_tables(tail, degrees, published):
    assert student_quantile(tail, degrees) == pytest.approx(published, abs=1e-3)


def test_interval_of_single_value_is_infinite():
    assert half_width([1.0], 0.05) == math.inf
    assert half_width([9, 10, 11], 0.05) == pytest.approx(2.92 / math.sqrt(3), rel=1e-3)


def test_levels_of_all_looks_add_up():
    looks = (3, 5, 8)
    assert sum(tail_of_look(count, looks, 0.05) for count in looks) == pytest.approx(0.05)


def noise(rng, kind, shape):
    """Return noise of standard deviation 1 or so: one row per case, in the order of time."""
    if kind == "normal":
        return rng.normal(size=shape)
    if kind == "heavy tails":
        return rng.standard_t(2.5, shape)
    drift = np.cumsum(rng.normal(size=shape), axis=1)  # a machine that warms up, or gets busier
    return drift / math.sqrt(shape[1]) + 0.5 * rng.normal(size=shape)


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "drift"])
def test_looks_at_data_without_effect_are_wrong_in_stated_share(kind):
    looks, level, cases = (3, 5, 8), 0.05, 4000
    runs = noise(np.random.default_rng(1), kind, (cases, 2 * looks[-1]))
    pairs = runs[:, 1::2] - runs[:, ::2]
    pairs[:, 1::2] *= -1  # the order within a pair alternates
    wrong = 0
    for values in pairs:
        ends = [
            values[:n].mean() - half_width(list(values[:n]), tail_of_look(n, looks, level))
            for n in looks
        ]
        wrong += max(ends) > 0
    assert wrong / cases <= level


def test_shared_level_keeps_the_stated_share_over_many_tests():
    """Tests with an effect hand their level on; a wrong decision stays as rare as stated."""
    rng, level, cases = np.random.default_rng(2), 0.1, 4000
    wrong = 0
    for _ in range(cases):
        shared = SharedLevel.among(12, level)
        for has_effect in rng.random(12) < 0.4:
            found = bool(has_effect or rng.random() < shared.level)
            wrong_now = found and not has_effect
            shared.decided(found)
            if wrong_now:
                wrong += 1
                break
    assert wrong / cases <= level + 0.01


def steps_of(rng, kind, ranks, steps):
    """Return the step times of equal ranks, relative to their mean, in ten blocks."""
    each = rng.standard_t(2.5, (ranks, steps)) if kind == "heavy tails" else None
    each = rng.normal(size=(ranks, steps)) if each is None else each
    if kind == "autocorrelated":
        for i in range(1, steps):
            each[:, i] = 0.7 * each[:, i - 1] + 0.7 * each[:, i]
    if kind == "drift":
        each = each + np.cumsum(rng.normal(size=steps)) / 3
    return (1 + 0.1 * each).reshape(ranks, 10, steps // 10).mean(axis=2)


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "autocorrelated", "drift"])
def test_equal_ranks_are_rarely_called_slower(kind, ranks):
    rng, cases = np.random.default_rng(7), 400
    wrong = sum(bool(is_slowest(steps_of(rng, kind, ranks, 100))) for _ in range(cases))
    assert wrong / cases <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / cases)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_spread_of_equal_ranks_is_zero_on_average(ranks):
    rng = np.random.default_rng(8)
    found = [rank_spread(steps_of(rng, "normal", ranks, 40)) for _ in range(400)]
    assert abs(np.mean([one.longest_minus_shortest for one in found])) < 0.003
    assert abs(np.mean([one.longest_minus_mean for one in found])) < 0.003


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_slow_rank_is_found_and_measured(ranks):
    rng, cases, found, named = np.random.default_rng(9), 100, [], 0
    for _ in range(cases):
        times = steps_of(rng, "normal", ranks, 40)
        times[-1] += 0.15  # of a step; single steps differ by 10 %
        named += bool(is_slowest(times))
        found.append(rank_spread(times))
    assert named / cases >= 0.95
    assert np.mean([one.longest_minus_shortest for one in found]) == pytest.approx(0.15, abs=0.01)
    behind = 0.15 * (ranks - 1) / ranks
    assert np.mean([one.longest_minus_mean for one in found]) == pytest.approx(behind, abs=0.01)


def test_rank_that_is_slow_from_some_step_on_is_measured():
    times = np.ones((4, 10))
    times[2, 6:] = 2
    assert rank_spread(times).longest_minus_shortest == pytest.approx(0.4, abs=0.1)


def test_nothing_is_said_of_few_blocks_or_one_rank():
    assert is_slowest(np.ones((4, 3))) is None
    assert is_slowest(np.ones((1, 10))) is None
    assert rank_spread(np.array([[1.0], [3.0]])).longest_minus_shortest == 2  # as it is


def test_range_of_equal_means_is_exceeded_in_stated_share():
    rng, cases = np.random.default_rng(10), 1000
    means = rng.normal(size=(cases, 8, 30)).mean(axis=2)
    assert np.mean(np.ptp(means, axis=1) > range_by_chance(1.0, 30, 8)) <= 0.05
