"""The gain of a search over random points: decided only where it is more than chance."""

import numpy as np
import pytest
from played_trials import PlayedServer, by_epochs, once, play, write_study

from paceline.report.tuning.tuning_files import tuning_json
from paceline.study.tune import study_view
from paceline.study.tune.study_view import read_view


def test_the_expected_best_is_that_of_all_subsets():
    values = np.array([3.0, 1.0, 2.0, 7.0])
    assert study_view._best(values, 2) == pytest.approx((7 * 3 + 3 * 2 + 2) / 6)
    assert study_view._best(values, 4) == 7.0


def test_equal_groups_have_no_gain(monkeypatch):
    monkeypatch.setattr(study_view, "RESAMPLES", 300)
    draw = np.random.default_rng(1)
    decided = [
        study_view.compare(
            draw.standard_exponential(10), draw.standard_exponential(30), True
        ).decided
        for _ in range(200)
    ]
    assert sum(decided) <= 12  # 6 % of the cases, for a level of 5 %


@pytest.mark.parametrize("goal", ["max", "min"])
def test_a_search_that_finds_better_points_has_a_gain(tmp_path, goal):
    def script(played):
        for step, value in once(played):
            yield step, value if goal == "max" else -value
        return 0

    path = write_study(tmp_path, trials=40, search="tpe", goal=goal)
    opened, _ = play(path, PlayedServer(script))
    found = read_view(opened).gain
    assert (found.random, found.searched, found.count) == (10, 30, 5)
    assert found.decided
    assert found.low > 0
    assert tuning_json(read_view(opened))["gain"]["decided"]


def test_random_points_alone_have_nothing_to_be_compared_with(tmp_path):
    opened, _ = play(write_study(tmp_path), PlayedServer(once))
    assert "6 at random and 0 searched" in read_view(opened).gain.reason


def test_a_pruner_says_which_steps_it_saved(tmp_path):
    path = write_study(tmp_path, trials=9, epochs=9, pruner="promotion")
    opened, _ = play(path, PlayedServer(by_epochs(9)), cores=1)
    view = read_view(opened)
    steps = sum(row.steps for row in view.rows)
    assert f"It trained {steps} of the 81 steps of 9 whole trials" in view.gain.reason
