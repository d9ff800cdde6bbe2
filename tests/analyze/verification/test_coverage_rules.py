"""Samples that N ranks train and evaluate, beside those of one process, by their contents."""

import random

import pytest

from paceline.analyze.verification.runs_facts import VerifyRuns
from paceline.observe.facts.ranks import RankFacts
from paceline.observe.facts.samples import BatchFacts, LoaderFacts, PassFacts, Phase
from trainings import LOADER, Training, find, shuffled, train

LOOP, FORWARD = "train.py:70", "train.py:71"


def add_inputs(facts, passes, phase, is_complete=True):
    """Add a loop over tensors: a list of batches, each a list of samples, for each pass."""
    loader = LoaderFacts(
        *(len(facts.loaders), LOOP, "", None, 0, True, None, "", False, False),
        workers=0,
    )
    facts.loaders.append(loader)
    for number, batches in enumerate(passes):
        loader.passes.append(
            PassFacts(number, phase, FORWARD, None, len(batches), None, is_complete, number)
        )
        facts.batches += [
            BatchFacts(loader.key, number, at, len(one), None, [list(one)], number)
            for at, one in enumerate(batches)
        ]
    return facts


def batches(samples, size=4):
    return [samples[at : at + size] for at in range(0, len(samples), size)]


def evaluated(*parts, whole=range(24), is_complete=True):
    """Return what is found if each rank evaluates a part, and one process the whole."""
    ranks = [
        add_inputs(RankFacts(rank, len(parts)), [batches(part)], Phase.EVALUATION, is_complete)
        for rank, part in enumerate(parts)
    ]
    alone = add_inputs(RankFacts(0, 1), [batches(whole)], Phase.EVALUATION)
    return find(VerifyRuns(ranks, alone=alone))


@pytest.mark.parametrize(
    "parts",
    [
        (range(0, 24, 2), range(1, 24, 2)),
        (range(24), range(24)),
        (range(100, 112), range(112, 124)),  # others than those of one process: unknown
    ],
)
def test_right_evaluations_without_a_loader(parts):
    assert evaluated(*parts) == []


def test_evaluations_that_cannot_be_compared_are_not_judged():
    assert evaluated(range(10), range(10, 20), is_complete=False) == []
    assert evaluated([5] * 10, [5] * 10, whole=[5] * 24) == []  # equal samples


def test_samples_that_no_rank_evaluates_are_named():
    (one,) = evaluated(range(0, 20, 2), range(1, 20, 2))
    assert one.mistake.id == "validation-misses-samples"
    assert one.lines == [LOOP, FORWARD]
    assert one.text == "Ranks 0 and 1 leave out 4 of 24 samples in a validation pass."
    assert not one.is_question


def test_samples_that_two_ranks_evaluate_are_named():
    (one,) = evaluated(range(14), range(12, 24))
    assert one.mistake.id == "validation-repeats-samples"
    assert "2 of them once more" in one.text


def trained(parts, whole, epochs=2):
    """Return what is found if each rank trains a part of tensors, in another order each epoch."""

    def order(part, epoch):
        return batches(random.Random(epoch).sample(list(part), len(part)))

    def loop(part):
        return [[batch for epoch in range(epochs) for batch in order(part, epoch)]]

    ranks = [
        add_inputs(RankFacts(rank, len(parts)), loop(part), Phase.TRAINING)
        for rank, part in enumerate(parts)
    ]
    alone = add_inputs(RankFacts(0, 1), loop(whole), Phase.TRAINING)
    return find(VerifyRuns(ranks, alone=alone))


def test_samples_that_no_rank_trains_are_named_without_a_loader():
    (one,) = trained((range(40), range(40, 80)), range(100))
    assert one.mistake.id == "samples-never-trained"
    assert "trains 100 different samples in an epoch. 2 ranks train 40, 40 in one" in one.text


@pytest.mark.parametrize(
    ("parts", "whole", "epochs"),
    [
        ((range(50), range(50, 100)), range(100), 2),
        ((range(48), range(48, 96)), range(100), 2),  # a remainder
        ((range(40), range(40, 80)), range(100), 1),  # an epoch may be longer
        ((range(200, 240), range(240, 280)), range(100), 2),
    ],
)
def test_right_trainings_without_a_loader(parts, whole, epochs):
    assert trained(parts, whole, epochs) == []


def kept(order, later):
    """Return what is found if a script reads a loader once, and then trains other batches."""
    ranks = train(Training(samples=48, order=order, epochs=1))
    for facts in ranks:
        read = [batch.contents[0] for batch in facts.batches]
        facts.loaders[0].passes[0].is_complete = True
        add_inputs(facts, [later(read)], Phase.TRAINING)
    return [one for one in find(VerifyRuns(ranks)) if one.mistake.id == "epoch-not-set"]


def test_batches_that_are_kept_are_named():
    (one,) = kept(lambda r, n, e: shuffled(r, n, e, 48), lambda read: [*read, *read])
    assert one.lines[0] != LOADER
    assert "itertools.cycle" in one.text
    assert kept(lambda r, n, e: list(range(r, 48, n)), lambda read: read) == []  # in order
    assert kept(lambda r, n, e: shuffled(r, n, e, 48), lambda read: read[-2:]) == []  # read ahead
    other = [[1000 + at] for at in range(12)]
    assert kept(lambda r, n, e: shuffled(r, n, e, 48), lambda read: other) == []
