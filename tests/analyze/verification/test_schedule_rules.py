"""Learning rates of N ranks beside those that one rank really had."""

import pytest

from paceline.observe.facts.steps import ScheduleFacts
from trainings import Training, find, train, verified


def questions(rate, size=2, samples=64):
    """Return what is asked about trainings with the learning rate of (ranks, step).

    An epoch has ``samples / 4 / size`` steps.
    """
    asked = Training(size, samples, rate=lambda rank, ranks, step: rate(ranks, step))
    runs = verified(asked, with_replay=False)
    runs.alone = train(Training(1, samples, rate=asked.rate))[0]
    for facts in (*runs.ranks, runs.alone):
        facts.schedules = [ScheduleFacts("LambdaLR", "train.py:15", 0, {}, ["train.py:25"])]
        facts.optimizers[0].initial_rates = [rate(facts.size, None)]
    return [one for one in find(runs) if one.is_question]


@pytest.mark.parametrize(
    ("initial", "largest", "wanted"),
    [(4, 16, ["learning-rate-scaled-twice"]), (4, 4, []), (1, 4, []), (4, 4.1, [])],
)
def test_largest_observed_rate_on_4_ranks(initial, largest, wanted):
    def rate(ranks, step):
        first, last = (initial, largest) if ranks == 4 else (1, 1)
        return 0.1 * (first + (last - first) * min((step or 0) / 6, 1))

    found = questions(rate, size=4)
    assert [x.mistake.id for x in found if "scaled" in x.mistake.id] == wanted
    assert all(x.values["rate"] == pytest.approx(0.1 * largest) for x in found if wanted)


def falling(length):
    return lambda step: 1 - step / length


def rising(length):
    return lambda step: min((step + 1) / length, 1.0)


@pytest.mark.parametrize(
    ("curve", "lengths", "is_asked"),
    [
        (falling, (50, 100), False),  # as many epochs
        (falling, (100, 100), True),  # as many steps: twice as many epochs on 2 ranks
        (falling, (25, 100), True),
        (rising, (50, 100), False),
        (rising, (20, 20), False),  # a warm-up with a number of steps
        (rising, (15, 60), True),
    ],
)
@pytest.mark.parametrize("scale", [1, 2])
def test_epochs_in_which_rates_change_as_much(curve, lengths, is_asked, scale):
    def rate(ranks, step):
        factor = scale if ranks > 1 else 1
        return 0.1 * factor * (1.0 if step is None else curve(lengths[2 - ranks])(step))

    found = [x for x in questions(rate) if x.mistake.id == "schedule-counts-other-steps"]
    assert len(found) == is_asked
    for one in found:
        assert one.lines[:2] == ["train.py:15", "train.py:25"]
        epochs = one.values["epochs"] / one.values["epochs_of_one"]
        assert epochs == pytest.approx(2 * lengths[0] / lengths[1])
        assert "epochs of 8 steps" in one.text
        assert "epochs of 16 steps" in one.text
