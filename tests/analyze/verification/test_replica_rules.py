"""Rules on what ranks share: parameters that one rank sends, steps that one skips, constants."""

from dataclasses import replace

from test_gradient_rules import ids, only

from paceline.observe.facts.models import StateFacts
from paceline.observe.facts.steps import BackwardFacts
from trainings import BACKWARD, LOOP, Training, find, own, train, verified


def copied(values):
    for one in values[1:]:
        for name, value in one.items():
            value.copy_(values[0][name])


def averaged(values):
    for name in values[0]:
        mean = sum(one[name] for one in values) / len(values)
        for one in values:
            one[name].copy_(mean)


def test_parameters_of_one_rank_are_no_average():
    runs = verified(Training(exchange=own, after_step=copied), with_replay=False)
    runs.ranks[0].steps[1].value_lines = ["train.py:30"]
    found = only(runs)
    assert found.mistake.id == "gradients-not-exchanged"
    assert found.lines[0] == "train.py:30"
    assert ids(verified(Training(exchange=own, after_step=averaged), with_replay=False)) == []


def skipping(clears):
    """Return runs in which rank 0 leaves out a step, and rank 1 one later: both make as many."""
    runs = verified(Training(epochs=1), with_replay=False)
    for facts in runs.ranks:
        step = facts.steps[1 + facts.rank]
        gradients = {} if clears else step.backwards[0].gradients
        step.backwards.insert(0, BackwardFacts(BACKWARD, 0, [0], 1.0, 1.0, 1.0, True, gradients))
    return runs


def test_step_that_another_rank_skips_elsewhere_is_named():
    found = only(skipping(clears=True))
    assert found.mistake.id == "replicas-diverge"
    assert found.ranks == [0]
    assert ids(skipping(clears=False)) == []  # other numbers of accumulated batches


def test_sum_over_samples_by_hand_is_named():
    def asked(root):
        one = Training(root=root, loss_known=False)
        runs = verified(one)
        runs.alone = train(replace(one, size=1, batch=4))[0]
        return runs

    summed = asked(lambda losses, rank, size, whole: losses.sum())
    assert only(summed).mistake.id == "loss-summed"
    divided = asked(lambda losses, rank, size, whole: losses.mean() / size)
    assert only(divided).mistake.id == "gradients-divided-twice"


def test_sum_that_a_scale_by_hand_multiplies_is_named():
    """A loss scale that the script divides out of the gradients."""

    def unscaled(ranks):
        mean = {name: sum(one[name] for one in ranks) / len(ranks) / 64 for name in ranks[0]}
        return [dict(mean) for _ in ranks]

    one = Training(root=lambda x, rank, size, whole: 64 * x.sum(), sums=True, exchange=unscaled)
    assert only(verified(one, with_replay=False)).mistake.id == "loss-summed"
    by_ranks = replace(one, root=lambda x, rank, size, whole: 64 * size * x.sum())
    assert ids(verified(by_ranks, with_replay=False)) == []


def with_tensor(root):
    """Return runs in which a tensor of the script differs between the ranks."""
    runs = verified(Training(root=root))
    for facts in runs.ranks:
        rows = {"queue.keys": facts.steps[3].backwards[0].gradients["0/head.bias"]}
        state = StateFacts("tensor", "queue.keys", LOOP, 4, rows=rows, changed_by=["train.py:7"])
        facts.states = [state]
    return find(runs)


def test_tensor_that_differs_is_a_question_where_gradients_differ():
    found = with_tensor(lambda losses, rank, size, whole: losses.mean() ** 2)
    asked = [one for one in found if one.mistake.id == "state-differs"]
    assert [(one.lines[0], one.is_question) for one in asked] == [("train.py:7", True)]
    assert "The tensor queue.keys differs between ranks 0 and 1" in asked[0].text
    assert with_tensor(lambda losses, rank, size, whole: losses.mean()) == []


def test_sum_with_other_terms_is_named():
    for weight in (1.0, 3e-3):  # as the divergence of an autoencoder

        def root(losses, rank, size, whole, weight=weight):
            return losses.sum() + weight * losses.square().sum()

        for with_replay in (False, True):
            runs = verified(Training(root=root, sums=True), with_replay)
            assert only(runs).mistake.id == "loss-summed"
