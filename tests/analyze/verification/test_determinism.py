"""What is said of replays that differ by more than rounding."""

import pytest

from paceline.analyze.verification.find import judge
from paceline.analyze.verification.joined_runs import JoinedRuns
from paceline.analyze.verification.replayed_steps import describe_noise
from paceline.observe.facts.events import OperatorFacts
from paceline.observe.facts.ranks import RankFacts
from trainings import Training, verified


def traced(*operators):
    return RankFacts(0, 1, operators=[OperatorFacts(*one) for one in operators])


FIRST = ("aten.mm", "train.py:7", 1)


@pytest.mark.parametrize(
    ("name", "line", "told"),
    [
        ("aten.rand", "train.py:8", "rand in train.py:8 draws other random numbers each time"),
        ("aten.lift_fresh", "train.py:8", "a value that does not come from torch"),
        ("aten.scatter_add", "", "the result of scatter_add differs when the same batch"),
    ],
)
def test_first_operator_that_differs_is_named(name, line, told):
    runs = [traced(FIRST, (name, line, value), ("aten.sum", "", value)) for value in (2, 3)]
    said = describe_noise(1e-3, runs)
    assert said.startswith(f"the script is not deterministic: {told}")
    assert "differ by 0.1 % (median)" in said
    assert said.endswith("a difference from one process below 2 % is not seen")


@pytest.mark.parametrize("runs", [[], [traced(FIRST), traced(FIRST)]])
def test_equal_operators_leave_the_order_of_samples(runs):
    said = describe_noise(0.2, runs)
    assert "the order of the samples of a batch changes gradients by 20 %" in said
    assert said.endswith("no difference from one process is seen")


def test_only_noise_that_rounding_does_not_explain_is_suspicious():
    runs = verified(Training(2, samples=48))

    def noise():
        joined = JoinedRuns(runs)
        return joined.replay.suspicious_noise(joined.steps[0])

    assert noise() == 0
    step = runs.permuted.steps[0]
    for row in step.gradients.values():
        runs.permuted.sketches[row] *= 1.1
    assert noise() == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize(("factor", "is_compared"), [(1.01, True), (1.2, False)])
def test_gradients_that_vary_by_as_much_as_any_mistake_are_not_compared(factor, is_compared):
    runs = verified(Training(2, samples=48))
    for step in runs.permuted.steps:
        for row in step.gradients.values():
            runs.permuted.sketches[row] *= factor
    found, seen = judge(runs)
    assert not [one for one in found if not one.is_question]
    assert (seen.replayed > 0) is is_compared
    assert ("have other gradients" in seen.not_replayed) is not is_compared
