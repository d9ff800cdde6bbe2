"""Decisions about noise are wrong at most in the share of cases that they state."""

import math

import numpy as np
import pytest

from paceline.significance import SharedLevel, half_width, student_quantile, tail_of_look


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
