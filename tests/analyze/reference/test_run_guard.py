"""The sequential test of a run's losses against the band of a reference."""

import numpy as np
import pytest
import records

from paceline.analyze.reference.metric import Metric
from paceline.analyze.reference.run_guard import MAX_NONFINITE, RunGuard, make_standard
from paceline.analyze.reference.series import Reference

FAULT = 300  # value at which faults set in


@pytest.fixture(scope="module")
def standard():
    return make_standard(records.loss_reference())


def hold(standard, values):
    """Return the divergence of a run; None if it stays within the band."""
    guard, run = RunGuard(standard), records.loss_series(values)
    for x, y in zip(run.along(standard.axis), run.values, strict=True):
        if guard.add(float(x), float(y)) is not None:
            break
    return guard.divergence


@pytest.mark.parametrize("seeds", [(0,), (0, 1), (0, 1, 2)])
def test_healthy_runs_are_no_alarm(seeds):
    standard = make_standard(records.loss_reference(seeds))
    assert [seed for seed in range(10, 30) if hold(standard, records.healthy_losses(seed))] == []


def test_autocorrelated_healthy_runs_are_no_alarm():
    standard = make_standard(records.loss_reference(correlation=0.7))
    runs = [records.healthy_losses(seed, correlation=0.7) for seed in range(10, 30)]
    assert [i for i, values in enumerate(runs) if hold(standard, values)] == []


@pytest.mark.parametrize(("size", "kind"), [(4.0, "high"), (-4.0, "low")])
def test_change_of_the_level_is_found_with_its_first_value(standard, size, kind):
    for seed in range(10, 15):
        values = records.healthy_losses(seed)
        values[FAULT:] += size * records.noise_of_loss(0.3)
        found = hold(standard, values)
        assert found is not None
        assert found.kind == kind
        assert FAULT - 3 <= found.start <= FAULT + 5
        assert found.found <= FAULT + 25


def test_slow_rise_is_found(standard):
    values = records.healthy_losses(11)
    values[FAULT:] += np.linspace(0, 2, len(values) - FAULT)
    found = hold(standard, values)
    assert found is not None
    assert FAULT <= found.found < FAULT + 80


def test_spike_that_recovers_is_no_alarm(standard):
    for length in (1, 3, 6):
        values = records.healthy_losses(12)
        values[FAULT : FAULT + length] += 10.0
        assert hold(standard, values) is None, length


def test_fault_after_a_spike_is_found(standard):
    values = records.healthy_losses(12)
    values[200:205] += 10.0
    values[FAULT:] += 0.3
    found = hold(standard, values)
    assert found is not None
    assert FAULT <= found.start <= found.found <= FAULT + 20


def test_plateau_is_no_alarm():
    def late(seed, start):
        values = records.healthy_losses(seed, count=400)
        plateau = 2.3 + np.random.default_rng(seed).normal(0, 0.02, start)
        return np.concatenate([plateau, values])[:500]

    runs = [records.loss_series(late(seed, start)) for seed, start in ((0, 80), (1, 95), (2, 110))]
    standard = make_standard(Reference(Metric(), runs))
    for seed, start in ((10, 85), (11, 100), (12, 120)):
        assert hold(standard, late(seed, start)) is None, start


def test_losses_that_are_not_finite(standard):
    values = records.healthy_losses(13)
    values[200] = np.nan  # a step that loss scaling skips
    assert hold(standard, values) is None
    values[FAULT:] = np.nan
    found = hold(standard, values)
    assert (found.kind, found.start, found.found) == (
        "nonfinite",
        FAULT,
        FAULT + MAX_NONFINITE - 1,
    )


def test_noisier_run_is_no_alarm(standard):
    """A script that prints the loss of one of four ranks."""
    draw = np.random.default_rng(5)
    for seed in range(10, 15):
        values = records.healthy_losses(seed)
        values += draw.normal(size=len(values)) * records.noise_of_loss(values) * 3**0.5
        assert hold(standard, values) is None


def test_run_that_is_longer_than_the_reference(standard):
    guard = RunGuard(standard)
    assert guard.add(standard.band.end + 1, 99.0) is None
    assert guard.is_over


def test_reference_with_too_few_values_is_refused():
    with pytest.raises(ValueError, match=r"has 12 values, and at least 40 .*HINT"):
        make_standard(records.loss_reference(count=12))


def test_reference_that_diverged_is_refused():
    values = records.healthy_losses(0)
    values[100] = np.inf
    with pytest.raises(ValueError, match=r"value inf at step 101\. HINT"):
        make_standard(Reference(Metric(), [records.loss_series(values)]))


def test_copies_of_a_run_count_once():
    same = records.loss_series(records.healthy_losses(0))
    standard = make_standard(Reference(Metric(), [same, same, same]))
    alone = make_standard(Reference(Metric(), [same]))
    assert standard.band.runs == 1
    assert np.array_equal(standard.band.offset, alone.band.offset)


def test_steps_are_compared_where_samples_are_not_known():
    runs = [records.loss_series(records.healthy_losses(seed), samples=False) for seed in range(3)]
    standard = make_standard(Reference(Metric(), runs))
    assert standard.axis == "steps"
    assert hold(standard, records.healthy_losses(10)) is None


@pytest.mark.long
@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_rate_of_false_alarms(correlation):
    """At most 1 % of healthy runs: 5 of 200 would be significantly more."""
    alarms = 0
    for first in range(0, 1000, 100):
        seeds = range(first, first + 3)
        standard = make_standard(records.loss_reference(seeds, correlation=correlation))
        for seed in range(first + 10, first + 30):
            alarms += (
                hold(standard, records.healthy_losses(seed, correlation=correlation)) is not None
            )
    assert alarms <= 5
