"""A prediction from a formula combined with a short measurement."""

import pytest

from paceline.analyze.diagnosis.rungs import Interval
from paceline.study.diagnose.try_remedies import MICRO_UNCERTAINTY, combine_predictions


def test_predictions_are_weighted_by_uncertainty():
    alike = combine_predictions(Interval(0.4, 0.2, 0.6), Interval(0.5, 0.3, 0.7))
    assert alike.mean == pytest.approx(0.45)
    assert alike.high - alike.low == pytest.approx(0.4 / 2**0.5)
    rough = combine_predictions(Interval(0.6, -0.4, 1.6), Interval(0.4, 0.2, 0.6))
    assert rough.mean == pytest.approx(0.4 + 0.2 / 26)


def test_measured_prediction_has_minimum_uncertainty():
    both = combine_predictions(
        Interval(0.0, -MICRO_UNCERTAINTY, MICRO_UNCERTAINTY), Interval(0.0, 0.0, 0.0)
    )
    assert both.high == pytest.approx(MICRO_UNCERTAINTY / 2**0.5)
    half = combine_predictions(
        Interval(1.0, 1 - 2 * MICRO_UNCERTAINTY, 1 + 2 * MICRO_UNCERTAINTY), Interval(0.9, 0.9, 0.9)
    )
    assert 0.9 < half.mean < 1.0


def test_measured_prediction_wins_if_intervals_do_not_overlap():
    apart = combine_predictions(Interval(0.2, 0.1, 0.3), Interval(0.8, 0.75, 0.85))
    assert apart.mean == pytest.approx(0.8)
    assert (
        apart.high - apart.mean == apart.mean - apart.low == pytest.approx(MICRO_UNCERTAINTY * 1.8)
    )
    # These intervals overlap.
    near = combine_predictions(Interval(0.5, 0.3, 0.7), Interval(0.8, 0.75, 0.85))
    assert 0.5 < near.mean < 0.8
