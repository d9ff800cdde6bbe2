"""Printed values beside those of one process: equal, by rounding, times, and other ones."""

import numpy as np
import pytest

from paceline.observe.facts.events import CollectiveFacts, OutputFacts
from paceline.observe.facts.models import StateFacts
from paceline.observe.facts.samples import BatchFacts, LoaderFacts, PassFacts, Phase
from trainings import Training, find, train, verified

PRINT, REDUCE, EVALUATE = "train.py:40", "train.py:38", "train.py:32"
SAMPLES = 40  # of the evaluation


def evaluated(facts, samples, step):
    """Add an evaluation after some steps."""
    key = len(facts.loaders)
    loader = LoaderFacts(key, EVALUATE, "TensorDataset", SAMPLES, 0, False, 8, "", False, False, 0)
    passed = PassFacts(0, Phase.EVALUATION, EVALUATE, None, 1, None, True, step)
    loader.passes.append(passed)
    facts.loaders.append(loader)
    contents = [[9000 + at for at in samples]]
    facts.batches.append(BatchFacts(key, 0, 0, len(samples), [*samples], contents, step))


def printing(
    ours,
    theirs,
    again=None,
    phase=Phase.EVALUATION,
    combined=None,
    parts=1,
    averages=(),
    **changes,
):
    """Return what is found if N ranks and two replays print these lines after 4 and 8 steps.

    averages: Factors of an averaged copy of the model, on rank 0 and in the first replay.
    """
    runs = verified(Training(**changes))
    again = again or theirs
    runs.replay.parts = parts
    for facts, lines in ((runs.ranks[0], ours), (runs.replay, theirs), (runs.permuted, again)):
        for step, text in zip((4, 8), lines, strict=False):
            facts.outputs.append(OutputFacts(text, PRINT, phase, step, 1, len(facts.batches)))
    for step in (4, 8):
        for facts in runs.ranks:
            evaluated(facts, range(facts.rank, SAMPLES, 2), step)
        for facts in (runs.replay, runs.permuted):
            evaluated(facts, range(SAMPLES), step)
    runs.ranks[0].collectives = [
        CollectiveFacts("allreduce", 8, combined or Phase.EVALUATION, 4, False, REDUCE)
    ]
    for facts, factor in zip((runs.ranks[0], runs.replay), averages, strict=False):
        row, parameter = len(facts.sketches), facts.steps[3].parameters["0/head.weight"]
        facts.sketches = np.vstack([facts.sketches, factor * facts.sketches[parameter]])
        for step in (4, 8):
            rows = {"0/head.weight": row}
            facts.states.append(StateFacts("average", "ema", EVALUATE, step, rows=rows))
    return [one for one in find(runs) if one.mistake.id == "metric-differs"]


def test_metric_that_differs_is_found_with_both_values_and_lines():
    (one,) = printing(
        ["val loss 0.7013 acc 0.8512", "val loss 0.6401 acc 0.8800"],
        ["val loss 0.6890 acc 0.8512", "val loss 0.6300 acc 0.8800"],
    )
    assert not one.is_question
    assert "2 ranks print 0.7013" in one.text
    assert "prints 0.6890 of 40 samples" in one.text
    assert one.lines[:3] == [REDUCE, PRINT, EVALUATE]
    assert one.step == 4


@pytest.mark.parametrize(
    ("ours", "theirs", "again"),
    [
        (["val loss 0.7013"] * 2, ["val loss 0.7014"] * 2, None),  # last digit
        (["val loss 0.7013"] * 2, ["val loss 0.7093"] * 2, ["val loss 0.7098"] * 2),  # rounding
        (["acc 0.8500", "acc 0.875"], ["acc 0.8750", "acc 0.850"], None),  # one of 40 samples
        (["val 2.512 s", "val 2.611 s"], ["val 1.401 s", "val 1.402 s"], None),  # a time
        (["score 2.512", "score 2.6"], ["score 1.401", "score 1.4"], ["score 1.523"] * 2),  # varies
        (["loss 0.5 lr 0.200"] * 2, ["loss 0.5 lr 0.100"] * 2, None),
        (["val 0.5 412.1 img/s"] * 2, ["val 0.5 300.2 img/s"] * 2, None),
    ],
)
def test_what_rounding_time_and_settings_explain_is_no_difference(ours, theirs, again):
    assert printing(ours, theirs, again) == []


def test_lines_are_compared_only_with_equal_parameters_and_samples():
    ours, theirs = ["val loss 0.7013"] * 2, ["val loss 0.6500"] * 2
    assert len(printing(ours, theirs)) == 1
    other = lambda rank, step, gradients: {n: 1.1 * one for n, one in gradients.items()}  # noqa: E731
    wrong_steps = printing(ours, theirs, change=lambda r, s, g: other(r, s, g) if r == 0 else g)
    assert wrong_steps == []


def test_values_of_averaged_weights_are_compared_only_if_these_are_equal():
    """One process that trains the parts of a batch updates averaged weights once for each part."""
    lines = ["val loss 0.7013"] * 2, ["val loss 0.6890"] * 2
    assert printing(*lines, averages=(1.0, 0.9)) == []
    assert len(printing(*lines, averages=(1.0, 1.0))) == 1


def test_values_of_a_training_are_asked_about():
    lines = ["step acc 0.7013", "step acc 0.6500"], ["step acc 0.6013", "step acc 0.5000"]
    (one,) = printing(*lines, phase=Phase.TRAINING)
    assert one.is_question
    (one,) = printing(*lines, phase=Phase.TRAINING, combined=Phase.TRAINING)
    assert not one.is_question  # the ranks have combined it


def test_values_that_differ_by_the_number_of_ranks_are_asked_about():
    """A mean over the batches of a loader, which has N times as many in one process."""
    words = {"phase": Phase.TRAINING, "combined": Phase.TRAINING}
    ours = ["loss 1.2516", "loss 1.1012"]
    (one,) = printing(ours, ["loss 0.6258", "loss 0.5506"], **words)
    assert one.is_question
    (other,) = printing(ours, ["loss 0.7258", "loss 0.6506"], **words)
    assert not other.is_question


def test_mean_training_loss_that_is_printed_after_an_evaluation_is_no_difference():
    """It is divided by a number of batches of its own, or one process trains parts of batches."""
    losses = [[x.loss for s in one.steps for x in s.backwards] for one in train(Training())]
    means = [sum(sum(one[at : at + 4]) for one in losses) / 8 for at in (0, 4)]
    line = lambda values: [f"loss {one:.5f} acc 0.8512" for one in values]  # noqa: E731
    other = line([means[0], 0.5 * means[1]])
    assert printing(line(means), line([0.5 * one for one in means])) == []
    assert printing(line(means), other) == []
    (one,) = printing(line([1.1 * one for one in means]), other)
    assert not one.is_question
    (one,) = printing(line([means[0], 1.1 * means[1]]), other)
    assert not one.is_question  # only one of the values is the mean


def test_values_of_parts_of_batches_are_asked_about_unless_they_are_of_an_evaluation():
    """A running mean of the training is another one if one process trains parts of batches."""
    ours, theirs = ["smooth 0.7013 val 0.5012"] * 2, ["smooth 0.6013 val 0.5012"] * 2
    assert [one.is_question for one in printing(ours, theirs)] == [False]
    assert [one.is_question for one in printing(ours, theirs, parts=2)] == [True]
    theirs = ["smooth 0.7013 val 0.7012"] * 2
    assert [one.is_question for one in printing(ours, theirs, parts=2)] == [False]
