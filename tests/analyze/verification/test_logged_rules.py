"""Rules on what Lightning logs, and on averaged weights of a resumed run."""

import pytest
from test_state_rules import resumed

from paceline.analyze.verification.runs_facts import VerifyRuns
from paceline.observe.facts.events import MetricFacts
from paceline.observe.facts.models import StateFacts
from paceline.observe.facts.samples import Phase
from trainings import Training, find, train


def logged(values, is_reduced=False, phase=Phase.EVALUATION):
    """Return ranks that log the value of their own."""
    ranks = train(Training(epochs=1))
    for facts, value in zip(ranks, values, strict=True):
        facts.metrics = [MetricFacts("val_loss", value, is_reduced, "train.py:30", phase)]
    return VerifyRuns(ranks)


def test_metric_that_is_logged_without_sync_dist_is_named():
    (one,) = [x for x in find(logged([0.75, 0.5])) if not x.is_question]
    assert one.mistake.id == "metric-of-one-rank"
    assert one.lines == ["train.py:30"]
    assert "val_loss is 0.75 on rank 0 and 0.5 on rank 1" in one.text
    assert [x.mistake.id for x in find(logged([0.75, float("nan")])) if not x.is_question] == [
        "metric-of-one-rank"
    ]


@pytest.mark.parametrize(
    "runs",
    [
        logged([0.75, 0.5], is_reduced=True),
        logged([0.75, 0.75]),  # combined by hand
        logged([float("nan"), float("nan")]),
        logged([0.75, 0.5], phase=Phase.TRAINING),
    ],
)
def test_metric_of_all_ranks_and_loss_of_a_batch_are_right(runs):
    assert [x.mistake.id for x in find(runs) if not x.is_question] == []


def test_metrics_are_compared_by_name_where_a_rank_logs_others_too():
    runs = logged([0.75, 0.5])
    more = MetricFacts("samples", 8.0, True, "train.py:31", Phase.EVALUATION)  # on rank 0 only
    runs.ranks[0].metrics.insert(0, more)
    (one,) = [x for x in find(runs) if not x.is_question]
    assert "val_loss is 0.75 on rank 0 and 0.5 on rank 1" in one.text


def with_average(value):
    """Return a resumed run that has the parameters of the other one, and averaged weights."""
    runs = resumed()
    runs.ranks[0].files[0].step = 4
    for old, facts in zip(runs.ranks, runs.resumed, strict=True):
        ours, theirs = old.steps[4].parameters, facts.steps[0].parameters
        for key, row in theirs.items():
            facts.sketches[row] = old.sketches[ours[key]]
        name, row = next(iter(ours.items()))
        old.states = [StateFacts("average", "ema", "train.py:15", 5, rows={name: row})]
        other = facts.steps[0].before[name]
        facts.sketches[other] = value * old.sketches[row]
        facts.states = [StateFacts("average", "ema", "train.py:15", 1, rows={name: other})]
    return [x for x in find(runs) if x.mistake.id == "checkpoint-incomplete"]


def test_averaged_weights_that_are_not_restored_are_named():
    assert [x for x in with_average(1.0) if "averaged" in x.text] == []
    (one,) = [x for x in with_average(1.1) if "averaged" in x.text]
    assert one.mistake.id == "checkpoint-incomplete"
    assert "train.py:9" in one.lines
    assert "After 1 steps of the resumed run" in one.text
