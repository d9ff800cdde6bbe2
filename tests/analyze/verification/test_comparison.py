"""The comparison with one process decides: what differs, what is meant, what was not compared."""

from dataclasses import replace

import pytest
import torch

from paceline.analyze.verification import find as rules
from paceline.analyze.verification.find import MISTAKES, judge
from paceline.analyze.verification.mistakes import Finding, Nature
from paceline.analyze.verification.relations import vectors
from paceline.analyze.verification.runs_facts import VerifyRuns
from paceline.observe.facts.events import CollectiveFacts, DrawFacts, OutputFacts
from paceline.observe.facts.ranks import SKETCH_SIZE
from paceline.observe.facts.samples import Phase
from paceline.report.verification_document import answer, exit_code
from trainings import Training, find, mean, own, total, train, verified


def spread(losses, rank, size, whole):
    """A loss that depends on which samples are in the batch."""
    return losses.mean() + 0.3 * losses.std()


def in_turn(asked):
    """Return the facts of one process that trains the batches of the ranks in turn."""
    facts, *others = train(replace(asked, exchange=mean))
    for number, step in enumerate(facts.steps):
        parts = [one for each in (facts, *others) for one in each.steps[number].backwards]
        first, *rest = [replace(one, root=one.root / asked.size) for one in parts]
        step.backwards = [first, *(replace(one, gradients={}) for one in rest)]
    facts.parts, facts.size = asked.size, 1
    for one in facts.batches:
        one.samples, one.indices = one.samples * asked.size, None
    return facts


def judged(runs, *accepted):
    """Return exit code, headline and the findings without those about learning rates."""
    found = (runs, *judge(runs, accepted))
    return exit_code(found), answer(found), [x for x in found[1] if "rate" not in x.mistake.id]


def test_loss_over_the_part_of_a_rank_is_confirmed_and_accepted_by_name():
    asked = Training(root=spread)
    runs = verified(asked)
    code, headline, (one,) = judged(runs)
    assert (code, one.kind) == (1, Nature.MEASURED)  # nothing confirms it
    assert judged(runs, "part-loss")[0] == 1
    runs.cut = in_turn(asked)
    code, headline, (one,) = judged(runs)
    assert (code, one.kind, one.meant) == (1, Nature.MEANT, "part-loss")
    assert one.step == 1
    assert "2 ranks do not train what one process does: 1 difference." in headline
    assert judged(runs, "batch-norm")[0] == 1
    code, headline, (one,) = judged(runs, "part-loss")
    assert (code, one.is_accepted) == (0, True)
    assert "but for: a loss or a normalization over the part of a rank (confirmed)" in headline


def test_padding_of_parts_is_usual_if_it_is_confirmed():
    """A model that computes something of padded values, which one process has more of."""
    asked = Training(root=spread)
    runs = verified(asked)
    runs.replay.is_collated = True
    assert judged(runs)[0] == 1
    runs.cut = in_turn(asked)
    code, headline, found = judged(runs)
    assert (code, found) == (0, [])
    assert "but for: padding of the batches of each rank to their longest sample" in headline


def test_losses_are_compared():
    """A term that has no gradient: nothing else differs."""

    def shifted(losses, rank, size, whole):
        return losses.mean() + 0.25 * (size > 1) * rank

    code, _, (one,) = judged(verified(Training(root=shifted)))
    assert (code, one.mistake.id, one.step) == (1, "gradients-differ", 1)
    assert "In step 1, the loss differs by " in one.text
    assert "on the ranks and " in one.text
    for exchange in (mean, total):  # a gradient that is summed has the loss of one process
        found = judged(verified(Training(exchange=exchange)))[2]
        assert [x.mistake.id for x in found] == ["gradients-summed"] * (exchange is total)
    hooked = Training(change=lambda rank, step, one: {n: 1.1 * g for n, g in one.items()})
    runs = verified(Training())
    runs.ranks = train(hooked)
    (one,) = judged(runs)[2]
    assert "The loss of the step is equal." in one.text
    runs = verified(Training())
    for facts in runs.ranks:
        for step in facts.steps:
            for each in step.backwards:
                each.root *= 1 + 1e-8
    assert judged(runs)[::2] == (0, [])


def test_difference_that_one_process_with_the_same_parts_has_not_is_not_accepted():
    asked = Training(root=lambda losses, rank, size, whole: spread(losses, 0, 1, 0) * (1 + rank))
    runs = verified(asked)
    runs.cut = in_turn(replace(asked, root=spread))
    code, _, (one,) = judged(runs, "part-loss")
    assert (code, one.kind, one.mistake.id) == (1, Nature.MEASURED, "gradients-differ")
    assert "Nor is it the gradient of one process that trains the batches of the ranks" in one.text


def test_wrong_weights_of_ranks_are_not_taken_for_a_meant_difference():
    """One process with parts of equal size has the same wrong weights as the ranks."""

    def masked(losses, rank, size, whole):  # ranks have other numbers of targets
        counts = torch.arange(len(losses)) % 4 != 3
        if size > 1 and rank:
            counts = torch.arange(len(losses)) % 4 == 0
        if size == 1 and len(losses) == 8:
            counts = torch.tensor([True, True, True, False, True, False, False, False])
        return losses[counts].mean()

    asked = Training(root=masked)
    runs = verified(asked)
    runs.permuted = None  # other samples are masked in another order
    runs.cut = in_turn(asked)
    code, _, (one,) = judged(runs, "part-loss")
    assert (code, one.mistake.id) == (1, "uneven-batches-averaged")
    assert one.difference is not None


def test_wrong_weights_of_accumulated_batches_are_no_padding():
    """Means over other numbers of words in each of the accumulated batches of a rank."""
    asked = Training(accumulate=2)
    runs = verified(asked)
    runs.replay.is_collated, runs.permuted = True, None
    for step in runs.replay.steps:
        parts = [
            vectors(facts, one.gradients)
            for facts in runs.ranks
            for one in facts.steps[step.index].backwards
        ]
        for name, row in step.gradients.items():
            value = sum(x * part[name] for x, part in zip((0.6, 0.2, 0.9, 0.3), parts, strict=True))
            runs.replay.sketches[row][:SKETCH_SIZE] = value[:SKETCH_SIZE]
    runs.cut = in_turn(asked)
    assert judged(runs)[0] == 1


def test_batch_norm_over_a_part_is_usual_if_it_is_confirmed():
    asked = Training(root=spread)
    runs = verified(asked)
    for one in runs.ranks:
        one.models[0].batch_norms = ["norm"]
    code, _, _ = judged(runs)
    assert code == 1
    runs.cut = in_turn(asked)
    code, headline, (one,) = judged(runs)
    assert (code, one.mistake.id, one.kind) == (0, "batch-norm-of-one-rank", Nature.MEANT)
    assert "2 ranks train what one process does, but for: batch normalization over the" in headline
    summed = VerifyRuns(train(replace(asked, exchange=total)), runs.replay, runs.permuted)
    summed.ranks[0].models[0].batch_norms, summed.cut = ["norm"], runs.cut
    code, _, (one, asked_about) = judged(summed, "batch-norm")
    assert (code, one.mistake.id) == (1, "gradients-summed")
    assert asked_about.is_question


def test_values_of_a_training_that_differs_as_is_meant_are_asked_about():
    asked = Training(root=spread, rate=lambda rank, size, step: 1e-6)
    runs = verified(asked)
    for facts, text in ((runs.ranks[0], 0.7013), (runs.replay, 0.6012), (runs.permuted, 0.6012)):
        place = ("train.py:40", Phase.TRAINING, 1, 1, 1)
        facts.outputs = [OutputFacts(f"hits {text}", *place)]
    place = ("allreduce", 8, Phase.TRAINING, 1, False, "train.py:38")
    runs.ranks[0].collectives = [CollectiveFacts(*place)]
    for is_meant in (False, True):
        for one in runs.ranks:
            one.models[0].batch_norms = ["norm"] * is_meant
        runs.cut = in_turn(asked) if is_meant else None
        found = {one.mistake.id: one for one in judged(runs)[2]}
        assert found["metric-differs"].is_question == is_meant


def test_batch_norm_of_all_ranks_is_no_difference():
    """A layer of the script that exchanges its statistics: one process computes the same."""
    runs = verified(Training())
    runs.ranks[0].models[0].batch_norms = ["norm"]
    assert judged(runs)[::2] == (0, [])


def drawn(runs, offset=0):
    """Add random numbers that the models of ranks and of one process draw."""
    for facts in runs.ranks:
        for number in range(2):
            state = 100 * facts.rank + number
            facts.draws.append(DrawFacts("forward", "torch", None, 0, 0, number, state, True, ""))
    for number in range(4):
        state = 100 * (number % 2) + number // 2 + offset
        draw = DrawFacts("forward", "torch", None, 0, 0, number, state, True, "")
        runs.replay.draws.append(draw)


def test_random_numbers_of_ranks_are_confirmed_by_drawing_them_again():
    asked = Training(root=spread)
    runs = VerifyRuns(train(asked), in_turn(asked))
    drawn(runs)
    code, headline, found = judged(runs)
    assert (code, found) == (0, [])
    assert "but for: random numbers of each rank in the model or the loop (confirmed)" in headline
    other = VerifyRuns(train(asked), in_turn(asked))
    drawn(other, offset=7)
    code, headline, found = judged(other)
    assert (code, found) == (0, [])
    assert "They were not compared with one process: one process could not draw" in headline


def test_parts_are_no_comparison_where_ranks_exchange_values_in_each_step():
    asked = Training(root=spread)
    runs = VerifyRuns(train(asked), in_turn(replace(asked, root=Training.root)))
    assert judged(runs)[0] == 1
    for facts in runs.ranks:
        for step in range(len(facts.steps)):
            one = ("allreduce", 8, Phase.TRAINING, step, False, "train.py:21")
            facts.collectives.append(CollectiveFacts(*one))
    for facts in (*runs.ranks, runs.replay):  # of another term of the loss
        for step in facts.steps:
            for one in step.backwards:
                one.loss = one.root / (1.0 if facts.size > 1 else 2.0)
    code, headline, found = judged(runs)
    assert (code, found) == (0, [])
    assert "not compared with one process: they exchange values in each step, and one" in headline


def test_model_that_only_one_rank_evaluates_is_no_part_of_a_model():
    runs = verified(Training())
    other = replace(runs.ranks[0].models[0], key=1, line="train.py:60")
    runs.ranks[0].models.append(other)
    code, headline, found = judged(runs)
    assert (code, found) == (0, [])
    assert "2 ranks train what one process does" in headline


def counting(facts, ranks):
    """Let one process compute another gradient from step 2 on, as if its loss counted batches."""
    for row in facts.steps[0].backwards[0].gradients.values():
        facts.sketches[row] /= ranks  # the weight of a part
    for step in facts.steps[1:]:
        for row in step.gradients.values():
            facts.sketches[row][:SKETCH_SIZE] *= 1.3
    return facts


@pytest.mark.parametrize("is_cut_only", [True, False])
def test_loss_that_counts_batches_is_not_held_against_parts(is_cut_only):
    asked = Training(root=spread)
    if is_cut_only:  # random numbers, or batches that can't be joined
        runs = VerifyRuns(train(asked), counting(in_turn(asked), 2))
        assert "They were not compared with one process" in judged(runs)[1]
    else:
        runs = verified(asked)
        runs.cut = counting(in_turn(asked), 2)
        runs.ranks[0].models[0].batch_norms = ["norm"]
    assert judged(runs)[0] == 0
    summed = replace(asked, exchange=total)  # the ranks do not average: that is a difference
    runs.ranks = train(summed)
    assert judged(runs)[0] == 1


def test_rule_that_fires_where_nothing_differs_does_not_accuse(monkeypatch):
    def rule(view):
        yield Finding(MISTAKES["gradients-summed"], ["train.py:1"], "It is summed.", step=1)

    monkeypatch.setattr(rules, "RULES", (rule,))
    assert find(verified(Training())) == []
    (alone,) = find(verified(Training(), with_replay=False))
    assert alone.is_wrong
    (one,) = find(verified(Training(exchange=total)))
    assert "In step 1, the gradient of " in one.text
    assert one.difference is not None


def test_updates_and_buffers_are_compared():
    runs = verified(Training())
    for facts in runs.ranks:
        row = facts.steps[2].parameters["0/head.weight"]
        facts.sketches[row][:SKETCH_SIZE] *= 1.01
    (one, *_) = judged(runs)[2]
    assert (one.mistake.id, one.step, one.layer) == ("gradients-differ", 3, "head.weight")
    assert "the update of head.weight differs by" in one.text
    runs = verified(Training())
    every = [*runs.ranks, runs.replay, runs.permuted]
    for facts in every:
        for step in facts.steps:
            step.buffers = {"0/center": facts.steps[0].before["0/first.bias"]}
    assert judged(runs)[::2] == (0, [])
    for facts in runs.ranks:
        facts.steps[1].buffers = {"0/center": facts.steps[0].before["0/first.weight"]}
    code, _, (one,) = judged(runs)
    assert (code, one.mistake.id, one.step) == (1, "state-differs", 2)
    assert "the buffer of center differs" in one.text


def test_averaged_parameters_and_parts_of_a_model_are_not_compared():
    """Local SGD: each rank uses its own gradient, and parameters are averaged in every 2nd step."""
    count = iter(range(100))

    def average(ranks):
        if next(count) % 2:
            for name in ranks[0]:
                whole = sum(one[name] for one in ranks) / len(ranks)
                for one in ranks:
                    one[name].copy_(whole)

    asked = Training(exchange=own, after_step=average)
    ranks = train(asked)
    single = verified(Training())
    code, headline, found = judged(VerifyRuns(ranks, single.replay, single.permuted))
    assert (code, found) == (0, [])
    assert "not compared with one process: the ranks average parameters" in headline


def test_training_whose_gradients_are_not_known_has_no_verdict():
    """An optimizer that holds the parameters from before the model was wrapped."""
    runs = verified(Training(), with_replay=False)
    for facts in runs.ranks:
        facts.optimizers[0].parameters = [["?0.0"]]
        for step in facts.steps:
            step.gradients, step.parameters, step.before = {}, {}, {}
    code, headline, _ = judged(runs)
    assert code == 2
    assert headline.startswith("No verdict: nothing could be compared.")
    assert "The optimizer of train.py:14 holds parameters of no model" in headline
    assert "HINT: make the optimizer after the wrapper" in headline
    alone = VerifyRuns(train(Training(size=1)))
    assert judged(alone)[0] == 2


def test_share_of_steps_that_was_not_compared_is_in_the_headline():
    runs = verified(Training())
    for facts in (runs.replay, runs.permuted):
        del facts.steps[6:]
    code, headline, _ = judged(runs)
    assert code == 0
    assert "2 of 8 steps were not compared with one process." in headline
    code, headline, _ = judged(verified(Training(), with_replay=False))
    assert code == 0
    assert headline.startswith("No difference between 2 ranks was found. They were not compared")


@pytest.mark.parametrize("one", MISTAKES.values(), ids=lambda one: one.id)
def test_table_says_what_is_measured(one):
    assert one.measured
    assert (one.nature is Nature.QUESTION) == one.measured.startswith("a question") or (
        one.id == "batch-norm-of-one-rank"
    )
