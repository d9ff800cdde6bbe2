"""The mixture of likelihood ratios: its bound on false alarms, and its detection of changes."""

import numpy as np

from paceline.analyze.reference.sequential import SequentialTest, measure_psi


def first_alarm(test, values):
    for number, z in enumerate(values):
        alarm = test.add(float(z), float(-z))
        if alarm is not None:
            return number, alarm
    return None


def test_false_alarms_of_normal_residuals_keep_the_rate():
    draw = np.random.default_rng(0)
    psi = measure_psi([draw.normal(size=2000)])
    found = [first_alarm(SequentialTest(psi, 300), draw.normal(size=300)) for _ in range(200)]
    assert sum(one is not None for one in found) <= 5  # at most 1 % expected


def test_psi_grows_with_autocorrelation_and_skewness():
    draw = np.random.default_rng(1)
    white = draw.normal(size=4000)
    smooth = np.convolve(white, np.ones(8) / 8**0.5, "same")
    skewed = draw.exponential(size=4000) - 1
    plain = measure_psi([white])
    assert np.all(measure_psi([smooth]) > 1.5 * plain)
    up, down = measure_psi([skewed])
    assert up[-1] > 1.2 * down[-1]


def test_change_is_dated():
    draw = np.random.default_rng(2)
    psi = measure_psi([draw.normal(size=2000)])
    for direction in (1, -1):
        values = draw.normal(size=300)
        values[200:] += 3 * direction
        number, alarm = first_alarm(SequentialTest(psi, 300), values)
        assert 200 < number < 215
        assert alarm.direction == direction
        assert 195 <= alarm.start <= 203


def test_forgotten_evidence_is_no_alarm():
    test = SequentialTest(measure_psi([]), 100)
    for _ in range(20):
        alarm = test.add(4.0, -4.0)
    assert alarm is not None
    test.forget()
    assert test.add(0.0, 0.0) is None
