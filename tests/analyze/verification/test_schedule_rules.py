"""Largest learning rates of schedules."""

import pytest

from paceline.analyze.verification.find import find
from paceline.observe.facts.steps import ScheduleFacts
from trainings import Training, train, verified


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
