"""Goals of ``--until``."""

import math

import pytest

from paceline.analyze.reference.metric import Goal, parse_goal


def test_goal_compares_values():
    goal = parse_goal("accuracy >= 0.97")
    assert goal == Goal("accuracy", ">=", 0.97)
    assert str(goal) == "accuracy>=0.97"
    assert [goal.is_reached(value) for value in (0.96, 0.97, math.nan)] == [False, True, False]
    assert goal.best([0.1, math.nan, 0.9]) == 0.9
    loss = parse_goal("<1e-2", r"loss (\S+)")
    assert (loss.name, loss.is_reached(0.01), loss.best([3.0, 2.0])) == ("", False, 2.0)
    assert loss.best([math.nan]) is None


@pytest.mark.parametrize("text", ["accuracy", "accuracy=0.9", "a>=", "a>=nan", "a>=inf", "a b>=1"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="HINT: --until"):
        parse_goal(text)


def test_goal_without_a_metric_is_refused():
    with pytest.raises(ValueError, match=r"names no metric\. HINT"):
        parse_goal(">=0.9")
