"""Rules on gradients: trainings with one mistake, and right ones that look similar."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.analyze.verification.find import judge
from paceline.analyze.verification.joined_runs import JoinedRuns
from paceline.analyze.verification.relations import vectors
from paceline.observe.facts.events import CollectiveFacts, DrawFacts
from paceline.observe.facts.ranks import SKETCH_SIZE, SQUARES
from paceline.observe.facts.samples import Phase
from paceline.observe.facts.steps import ClipFacts
from trainings import BACKWARD, MODEL, STEP, Training, find, mean, own, total, verified


def ids(runs):
    return [one.mistake.id for one in find(runs) if not one.is_question]


def only(runs):
    """Return the finding of a run with one mistake."""
    found = [one for one in find(runs) if not one.is_question]
    assert len(found) == 1, [(one.mistake.id, one.text) for one in found]
    return found[0]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("with_replay", [True, False])
def test_right_training_has_no_mistake(size, with_replay):
    found, seen = judge(verified(Training(size, samples=48), with_replay))
    assert [one.mistake.id for one in found if not one.is_question] == []
    assert seen.related == seen.steps > 4
    assert seen.parameters == 4
    assert (seen.replayed > 4) is with_replay
    assert not with_replay or 0 < seen.noise < 1e-5


def test_sum_of_gradients_is_named():
    found = only(verified(Training(3, exchange=total, samples=48)))
    assert found.mistake.id == "gradients-summed"
    assert found.lines[0] in (MODEL, BACKWARD)
    assert "3 times that of one process" in found.text
    assert only(verified(Training(exchange=total), with_replay=False)).mistake.id == (
        "gradients-summed"
    )


def test_sum_of_divided_losses_is_right():
    divided = Training(exchange=total, root=lambda losses, rank, size, whole: losses.mean() / size)
    assert ids(verified(divided)) == []
    assert ids(verified(divided, with_replay=False)) == []
    by_whole = Training(
        exchange=total,
        root=lambda losses, rank, size, whole: losses.sum() / whole,
        order=lambda rank, size, epoch: list(range(rank, 30, size))[: 13 + 2 * rank],
        samples=30,
        sums=True,
    )
    assert "gradients-summed" not in ids(verified(by_whole, with_replay=False))


def test_loss_weights_of_a_replay_in_parts_are_added():
    """One rank trained the batches of both ranks one after the other, each with half the weight."""
    runs = verified(Training())
    runs.replay.parts = 2
    # Gradients of models that draw random numbers can't be compared.
    runs.replay.draws.append(DrawFacts("forward", "torch", None, 0, 0, 0, 1, True, "train.py:1"))
    for step in runs.replay.steps:
        (whole,) = step.backwards
        half = replace(whole, root=whole.root / 2)
        step.backwards = [replace(half, gradients={}, batches=[]), half]
    assert "gradients-summed" not in ids(runs)


def test_samples_of_two_backwards_of_one_batch_are_counted_once():
    """Two losses of the same batch, each with a backward: the step trains the batch once."""
    runs = verified(Training())
    for facts in (*runs.ranks, runs.replay, runs.permuted):
        for step in facts.steps:
            (one,) = step.backwards
            names = (("first.weight", "first.bias"), ("head.weight", "head.bias"))
            parts = [{f"0/{n}": one.gradients[f"0/{n}"] for n in part} for part in names]
            step.backwards = [replace(one, gradients=part, loss=None) for part in parts]
    (first, *_) = JoinedRuns(runs).steps
    assert first.samples == [4, 4]
    assert JoinedRuns(runs).replay.gradients(first) is not None
    assert ids(runs) == []


def test_other_terms_of_a_loss_are_no_multiple_of_the_gradient():
    """Without a comparison, the loss tells the weight of a gradient only if it has one term."""
    runs = verified(Training(), with_replay=False)
    for facts in runs.ranks:
        for step in facts.steps:
            for one in step.backwards:
                one.loss = one.root * (2.0 if step.index == 3 else 1.0 + 0.1 * step.index)
    assert ids(runs) == []


def test_second_division_is_named():
    twice = Training(exchange=lambda ranks: mean([{n: v / 2 for n, v in r.items()} for r in ranks]))
    assert only(verified(twice)).mistake.id == "gradients-divided-twice"
    of_loss = Training(root=lambda losses, rank, size, whole: losses.mean() / size)
    assert only(verified(of_loss)).mistake.id == "gradients-divided-twice"
    found = only(verified(of_loss, with_replay=False))
    assert found.mistake.id == "gradients-divided-twice"
    assert found.lines[0] == BACKWARD


def test_sum_over_samples_that_is_averaged_is_named():
    sums = Training(root=lambda losses, rank, size, whole: losses.sum(), sums=True)
    assert only(verified(sums, with_replay=False)).mistake.id == "loss-summed"
    scaled = Training(
        root=lambda losses, rank, size, whole: losses.sum(),
        sums=True,
        rate=lambda rank, size, step: 0.01 * size,
    )
    assert ids(verified(scaled)) == []  # the learning rate may make up for it
    (asked,) = [one for one in find(verified(scaled)) if one.mistake.id == "loss-summed"]
    assert "Does it depend on the number of ranks only?" in asked.text
    summed = Training(
        root=lambda losses, rank, size, whole: losses.sum(), sums=True, exchange=total
    )
    assert ids(verified(summed)) == []  # one process would sum, too


def test_gradients_of_one_rank_are_named():
    found = only(verified(Training(exchange=own)))
    assert found.mistake.id == "gradients-not-exchanged"
    assert found.values["steps"] == found.values["of_steps"]
    first = only(verified(Training(exchange=lambda ranks: [ranks[0]] * len(ranks))))
    assert first.mistake.id == "gradients-differ"
    assert first.step == 1


def test_gradients_that_are_changed_and_not_exchanged_make_replicas_diverge():
    """A script changes what torch.autograd.grad returns, and assigns it to grad."""

    def changed(ranks):
        return [{name: value.abs() for name, value in one.items()} for one in ranks]

    runs = verified(Training(exchange=changed), with_replay=False)
    assert ids(runs) == ["replicas-diverge"]


def test_parameter_that_is_not_exchanged_is_named():
    def partly(ranks):
        return [
            whole | {name: one[name] for name in ("head.weight", "head.bias")}
            for one, whole in zip(ranks, mean(ranks), strict=True)
        ]

    found = only(verified(Training(exchange=partly)))
    assert found.mistake.id == "gradients-not-exchanged"
    assert found.layer == "head.weight"
    assert "head.weight and head.bias are those of each rank alone" in found.text


def test_frozen_parameters_that_were_thawed_are_named_with_the_wrapper():
    def partly(ranks):
        return [
            whole | {name: one[name] for name in ("first.weight", "first.bias")}
            for one, whole in zip(ranks, mean(ranks), strict=True)
        ]

    runs = verified(Training(exchange=partly))
    for facts in runs.ranks:
        for one in facts.models[0].parameters[:2]:
            one.requires_grad = False
    found = only(runs)
    assert found.lines[0] == MODEL
    assert "No gradient was required when the model was wrapped" in found.text


def test_local_sgd_is_said_and_not_accused():
    """Ranks that train alone, and average parameters between some steps."""

    steps = itertools.count(1)

    def average(values):
        if next(steps) % 4 == 0:
            for name in values[0]:
                mean = sum(one[name] for one in values) / len(values)
                for one in values:
                    one[name].copy_(mean)

    found, seen = judge(verified(Training(exchange=own, after_step=average), with_replay=False))
    assert not {"gradients-not-exchanged", "replicas-diverge"} & {x.mistake.id for x in found}
    assert any("local SGD" in note for note in seen.notes)


def test_rounded_and_compressed_exchanges_are_right():
    def rounded(ranks):
        return mean([{n: v.bfloat16().float() for n, v in one.items()} for one in ranks])

    found, seen = judge(verified(Training(exchange=rounded)))
    assert [one.mistake.id for one in found if not one.is_question] == []
    assert any("rounds gradients" in note for note in seen.notes)

    def sparse(ranks):
        return mean([{n: v * (v.abs() > v.abs().median()) for n, v in r.items()} for r in ranks])

    found, seen = judge(verified(Training(exchange=sparse), with_replay=False))
    assert [one.mistake.id for one in found if not one.is_question] == []
    assert any("is no sum of the ranks' gradients" in note for note in seen.notes)


def test_clipping_after_the_exchange_is_right():
    assert ids(verified(Training(clip=0.05))) == []


def test_clipping_before_the_exchange_is_named():
    found = only(verified(Training(clip=0.05, clip_before=True)))
    assert found.mistake.id == "clipped-before-exchange"
    assert found.lines[0] == "train.py:23"
    # also while the norms are below the limit
    assert only(verified(Training(clip=1e3, clip_before=True))).mistake.id == (
        "clipped-before-exchange"
    )


def test_clipping_after_each_of_several_backwards_is_named():
    runs = verified(Training(clip=0.05), with_replay=False)
    assert ids(runs) == []
    for facts in runs.ranks:
        for step in facts.steps:  # the rank's own gradient, which a clip halves
            own = step.backwards[0].gradients
            rows = dict(zip(own, range(len(facts.sketches), 10**9), strict=False))
            halves = facts.sketches[list(own.values())] / 2
            halves[:, SQUARES] /= 2
            facts.sketches = np.concatenate([facts.sketches, halves])
            step.clips.insert(0, ClipFacts("train.py:77", 0.05, 1.0, own, rows))
    found = only(runs)
    assert found.mistake.id == "clipped-before-exchange"
    assert found.lines[0] == "train.py:77"
    assert "each rank clips its own gradient at 0.05" in found.text


@pytest.mark.parametrize(
    "clip",
    [
        lambda one, whole: {n: v * 0.1 / whole for n, v in one.items()},
        lambda one, whole: {n: v * min(1.0, float(0.02 / v.norm())) for n, v in one.items()},
        lambda one, whole: {n: v.clamp(-0.01, 0.01) for n, v in one.items()},
    ],
    ids=["by the norm", "each parameter", "each value"],
)
@pytest.mark.parametrize("by_hook", [True, False])
def test_clipping_by_hand_is_a_measured_difference_with_its_line(clip, by_hook):
    def clipped(one):
        return clip(one, torch.cat([v.flatten() for v in one.values()]).norm())

    asked = Training(exchange=lambda ranks: mean([*map(clipped, ranks)]))
    runs = verified(Training(hook=clipped) if by_hook else asked)
    for facts in runs.ranks:
        facts.models[0].hook_lines = ["train.py:11"] * by_hook
        for number, step in enumerate(facts.steps):
            step.gradient_lines = [] if by_hook else ["train.py:21", "train.py:22"]
            kind = ("allreduce", 4000, Phase.TRAINING, number, False, "train.py:22")
            facts.collectives.append(CollectiveFacts(*kind))
    one = only(runs)
    assert (one.mistake.id, one.step) == ("gradients-differ", 1)
    assert one.lines[0] == ("train.py:11" if by_hook else "train.py:21")


@pytest.mark.parametrize("with_replay", [True, False])
def test_hooks_that_scale_are_right(with_replay):
    """A factor of a layer, and elements that are not trained."""
    half = Training(hook=lambda one: {n: v * 0.5 for n, v in one.items()})
    part = Training(hook=lambda one: {n: v * (v.shape[0] != 3) for n, v in one.items()})
    assert ids(verified(half, with_replay)) == ids(verified(part, with_replay)) == []


def test_hooks_that_divide_by_the_ranks_are_named():
    runs = verified(Training(hook=lambda one: {n: v / 2 for n, v in one.items()}))
    assert ids(runs) == []  # one process divides as well
    runs.replay, runs.permuted = (verified(Training()).replay, verified(Training()).permuted)
    for facts in runs.ranks:
        facts.models[0].hook_lines = ["train.py:11"]
    found = only(runs)
    assert found.mistake.id == "gradients-divided-twice"
    assert found.lines[0] == "train.py:11"


def test_accumulation_of_divided_losses_is_right():
    def divided(losses, rank, size, whole):
        return losses.mean() / 4

    assert ids(verified(Training(accumulate=4, root=divided))) == []
    # 5 batches per epoch: the last group has one
    assert ids(verified(Training(accumulate=4, root=divided, samples=40))) == []


def test_accumulation_without_division_is_named():
    found = only(verified(Training(accumulate=4)))
    assert found.mistake.id == "accumulation-divided-wrongly"
    assert found.lines[0] == BACKWARD
    twice = Training(accumulate=4, root=lambda losses, *_: losses.mean() / 16)
    assert only(verified(twice)).mistake.id == "accumulation-divided-wrongly"


def test_gradients_that_are_set_to_zero_between_batches_are_named():
    divided = Training(accumulate=4, root=lambda losses, *_: losses.mean() / 4)
    runs = verified(divided, with_replay=False)
    for facts in runs.ranks:
        for step in facts.steps:
            last = step.backwards[-1].gradients
            for one in step.backwards[:-1]:
                one.gradients = {}
            for name, row in step.gradients.items():
                both = [
                    f.sketches[f.steps[step.index].backwards[-1].gradients[name]]
                    for f in runs.ranks
                ]
                facts.sketches[row] = sum(both) / 2
            assert last
    found = only(runs)
    assert found.mistake.id == "accumulation-divided-wrongly"
    assert "uses the gradient of the last 1 only" in found.text


def test_uneven_batches_with_equal_weights_are_named():
    def uneven(rank, size, epoch):
        return list(range(20)) if rank == 0 else list(range(20, 37))

    found = only(verified(Training(order=uneven, samples=37, has_epoch=False)))
    assert found.mistake.id == "uneven-batches-averaged"
    assert "over 4 and 1 samples" in found.text
    # Without a comparison, nothing is measured.
    assert (
        ids(verified(Training(order=uneven, samples=37, has_epoch=False), with_replay=False)) == []
    )


def test_uneven_batches_with_weights_are_right():
    weighted = Training(
        order=lambda rank, size, epoch: list(range(20)) if rank == 0 else list(range(20, 37)),
        samples=37,
        has_epoch=False,
        root=lambda losses, rank, size, whole: losses.mean() * len(losses) * size / whole,
    )
    assert ids(verified(weighted)) == []
    assert ids(verified(weighted, with_replay=False)) == []


def test_other_weights_in_one_process_are_measured():
    def weighted(losses, rank, size, whole):  # as if the first sample had the weight of three
        weights = torch.tensor([3.0 if rank == 0 and size > 1 else 1.0] * len(losses))
        return (losses * weights).sum() / weights.sum()

    runs = verified(Training(root=weighted, loss_known=False))
    runs.permuted = None  # as the replay, which is changed
    for step in runs.replay.steps:  # rank 0's samples weigh three times as much in one process
        facts = runs.ranks
        joint = [vectors(f, f.steps[step.index].backwards[0].gradients) for f in facts]
        for name, row in step.gradients.items():
            one, two = (each[name][:SKETCH_SIZE] for each in joint)
            runs.replay.sketches[row][:SKETCH_SIZE] = 0.75 * one + 0.25 * two
    (found,) = [one for one in find(runs) if one.mistake.id == "uneven-batches-averaged"]
    assert not found.is_question
    assert found.difference is not None
    assert "theirs have the weights 0.75 and 0.25" in found.text


def test_loss_that_depends_on_the_rank_is_a_measured_difference():
    odd = Training(
        root=lambda losses, rank, size, whole: losses.mean() * (1.5 if rank else 0.5),
        loss_known=False,
    )
    one = only(verified(odd))
    assert one.mistake.id == "gradients-differ"
    assert one.is_wrong
    assert "differs by" in one.text
    assert "(rounding: " in one.text
    assert one.values["difference"] > 100 * one.values["rounding"]


def test_different_optimizers_are_replicas_that_diverge():
    noisy = Training(change=lambda rank, step, one: one)
    runs = verified(noisy)
    facts = runs.ranks[1]
    for step in facts.steps[3:]:
        for row in step.parameters.values():
            facts.sketches[row] *= 1.01
    found = only(runs)
    assert found.mistake.id == "replicas-diverge"
    assert found.step == 4
    assert found.lines[0] == STEP
    assert "Their gradients are equal" in found.text


def test_shards_of_flat_parameters_are_no_replicas():
    runs = verified(Training(exchange=own, wrapper="FullyShardedDataParallel"), with_replay=False)
    for facts in runs.ranks:
        facts.models[0].is_sharded = True
        for step in facts.steps:  # gradients before the exchange are not known
            step.backwards[0].gradients = {}
    assert ids(runs) == []


def test_parameters_that_change_between_steps_are_named_with_the_line():
    runs = verified(Training())
    facts = runs.ranks[1]
    for step in facts.steps[3:]:
        for rows in (step.before, step.parameters):
            for row in rows.values():
                facts.sketches[row] *= 1.01
    facts.steps[3].value_lines = ["train.py:31"]
    found = only(runs)
    assert found.mistake.id == "replicas-diverge"
    assert found.lines[0] == "train.py:31"
    assert "Before step 4, " in found.text


def test_different_seeds_are_one_mistake():
    found = only(verified(Training(seed=lambda rank: rank)))
    assert found.mistake.id == "replicas-start-different"
    assert found.lines[0] == MODEL
    assert found.ranks == [1]
