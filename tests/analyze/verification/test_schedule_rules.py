"""Schedules beside the whole training, whose number of epochs is known from its loop."""

import pytest

from paceline.analyze.verification.find import find
from paceline.record.training.facts.steps import SCHEDULE_END, ScheduleFacts
from trainings import Training, train, verified


def scheduled(name, length, epochs=5, accumulate=2, calls=1, batch=4):
    """Return mistakes of a schedule in a training of 5 epochs with 4 batches each on a rank."""
    asked = Training(epochs=2, accumulate=accumulate, batch=batch)
    runs = verified(asked, with_replay=False)
    for facts in runs.ranks:
        for number, one in enumerate(facts.loaders[0].passes):
            one.epoch, one.epochs = number, epochs
        steps = [at for at in range(1, len(facts.steps) + 1) for _ in range(calls)]
        facts.schedules = [
            ScheduleFacts("Cosine", "train.py:15", 0, {name: [length]}, ["train.py:25"], steps)
        ]
    wanted = "schedule-counts-other-steps"
    return [one for one in find(runs) if one.mistake.id == wanted]


@pytest.mark.parametrize("name", ["T_max", SCHEDULE_END])
def test_schedule_of_batches_that_are_accumulated_is_named(name):
    (one,) = scheduled(name, 20)
    assert one.is_question
    assert one.lines == ["train.py:15", "train.py:25"]
    assert "have 10 steps: it ends after 1/2 of the schedule" in one.text


def test_schedule_of_all_ranks_batches_is_named():
    (one,) = scheduled("total_steps", 40, accumulate=1)
    assert "Does it count each rank?" in one.text


def test_right_schedules():
    assert scheduled("T_max", 10) == []
    assert scheduled("T_max", 20, calls=2) == []  # it advances with each batch
    assert scheduled("T_max", 20, epochs=0) == []  # how long the training is, is not known
    assert scheduled("step_size", 20) == []
    assert scheduled("T_max", 14) == []


@pytest.mark.parametrize(
    ("initial", "largest", "wanted"),
    [(4, 16, ["learning-rate-scaled-twice"]), (4, 4, []), (1, 4, []), (4, 4.1, [])],
)
def test_largest_rate_of_a_schedule_on_4_ranks(initial, largest, wanted):
    """Warm-ups that are longer than the steps that are observed."""
    runs = verified(Training(4, samples=64), with_replay=False)
    runs.alone = train(Training(size=1))[0]
    for facts, first, peak in ((runs.ranks[0], initial, largest), (runs.alone, 1, 1)):
        facts.optimizers[0].initial_rates = [0.1 * first]
        facts.schedules = [ScheduleFacts("LambdaLR", "train.py:15", 0, {}, peaks=[0.1 * peak])]
    (*found,) = [one for one in find(runs) if "learning-rate-scaled" in one.mistake.id]
    assert [one.mistake.id for one in found] == wanted
    assert all(one.is_question for one in found)  # the user's choice: both values are given
