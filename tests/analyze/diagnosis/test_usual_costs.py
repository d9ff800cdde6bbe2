"""Losses of any training on several ranks are no causes, unless they are large."""

import pytest
from rungs import rung
from test_causes import SLOWER, collective, judged

from paceline.analyze.diagnosis.causes import Cause, split_usual
from paceline.analyze.figures.losses import Loss


def cause(name, share, **evidence):
    return Cause(name, share, (share, share), "something", evidence)


@pytest.mark.parametrize(
    ("one", "usual"),
    [
        (cause("shared-machine", 0.15), True),
        (cause("shared-machine", 0.25), False),
        (cause("exchange-bandwidth", 0.15), True),
        (cause("jitter", 0.15), True),
        (cause("exchange-latency", 0.15, calls_a_step=1), True),
        (cause("exchange-latency", 0.15, calls_a_step=40), False),  # fewer collectives take less
        (cause("bucket-size", 0.06), False),
        (cause("metric-collectives", 0.06), False),
    ],
)
def test_costs_of_each_training_are_causes_only_if_they_are_large(one, usual):
    assert split_usual([one]) == (([], [one]) if usual else ([one], []))


def test_costs_of_a_node_that_its_ranks_share_and_of_its_exchange_are_usual():
    shared = {name: rung(0.115) for name in ("silent", "cached", "everything")}
    assert [one.id for one in split_usual(judged(**shared))[1]] == ["shared-machine"]
    found = judged(losses=[Loss("transfer", 0.5)], calls=collective(size=4_000_000), **SLOWER)
    causes, usual = split_usual(found)
    assert [one.id for one in causes] == ["exchange-bandwidth"]
    assert usual == []
