"""What changed when a loss left the band: replicas, learning rate, norms, values, a rank."""

import math

import numpy as np
import records

from paceline.analyze.reference.changes import JobStep, RateWatch, ReplicaWatch, find_changes
from paceline.analyze.reference.metric import Metric
from paceline.analyze.reference.run_guard import Divergence
from paceline.analyze.reference.series import Reference, Series

LEFT = Divergence("high", 100, 110, 2.0, 1.0)


def steps(change=lambda number: {}, count=130):
    usual = {"losses": {0: 1.0, 1: 1.1}, "rate": 0.1, "norm": 1.0}
    found = []
    for number in range(1, count):
        values = {**usual, **(change(number) if number >= 100 else {})}
        found.append(JobStep(number, 64 * number, 1.0, bits={}, **values))
    return found


def kinds(change):
    return [
        one.kind for one in find_changes(steps(change), 100, records.loss_reference(), None, LEFT)
    ]


def test_each_change_is_named():
    assert kinds(lambda n: {}) == []
    assert kinds(lambda n: {"rate": 1.0}) == ["learning-rate"]
    assert kinds(lambda n: {"norm": 20.0}) == ["gradient-norm"]
    assert kinds(lambda n: {"losses": {0: 1.0, 1: math.nan}}) == ["nonfinite"]
    assert kinds(lambda n: {"losses": {0: 1.0, 1: 5.0}}) == ["rank-loss"]
    assert kinds(lambda n: {"norm": math.inf}) == ["nonfinite"]


def test_scripts_without_norms_and_rates_have_no_change():
    unknown = [JobStep(n, 64 * n, 1.0, {0: 1.0}, math.nan, math.nan, {}) for n in range(1, 130)]
    assert find_changes(unknown, 100, records.loss_reference(), None, LEFT) == []


def test_drop_of_the_schedule_that_the_reference_has_too_is_no_change():
    run = records.loss_series(records.healthy_losses(0))
    rates = np.where(run.steps < 100, 0.1, 0.01)
    known = Reference(Metric(), [Series(run.steps, run.steps * 64, run.values, rates, run.norms)])
    assert find_changes(steps(lambda n: {"rate": 0.01}), 100, known, None, LEFT) == []


def test_replicas_that_drift_apart():
    watch = ReplicaWatch(3)
    for step in range(0, 40, 4):
        assert watch.add(step, {0: step, 1: step, 2: step}) is None
    assert watch.add(40, {0: 1, 1: 2, 2: 1}) is None
    found = watch.add(44, {0: 3, 1: 4, 2: 3})
    assert (found.equal_at, found.step, found.ranks) == (36, 40, [1])
    text = find_changes([], 40, records.loss_reference(), found, None)[0].text
    assert "the parameters of rank 1 differ" in text
    assert "since step 40" in text


def test_ranks_that_never_were_replicas_are_no_finding():
    watch = ReplicaWatch(2)
    assert all(watch.add(step, {0: step, 1: -step}) is None for step in range(20))


def test_local_sgd_is_no_finding():
    """Ranks are equal after each average, and differ between."""
    watch = ReplicaWatch(2)
    for step in range(100):
        assert watch.add(step, {0: step, 1: step if step % 4 == 0 else -step}) is None


def test_rate_that_rises_where_the_reference_does_not():
    run = records.loss_series(records.healthy_losses(0))

    def rise_at(rates, jump):
        known = Reference(Metric(), [Series(run.steps, run.samples, run.values, rates, run.norms)])
        watch = RateWatch(known)
        for step in range(1, 400):
            watch.add(step, 32.0 * step, 1.0 if step >= jump else 0.1)
        return watch.rise

    assert rise_at(np.full(500, 0.1), 200).step == 200
    assert rise_at(np.where(run.steps < 205, 0.1, 1.0), 200) is None
    assert rise_at(np.full(500, np.nan), 200) is None
