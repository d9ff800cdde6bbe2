"""The number of training steps measured at a time."""

import pytest

from paceline.study.diagnose.plan import in_bursts


@pytest.mark.parametrize(
    ("steps", "burst", "whole"),
    [(3, 2, 4), (10, 2, 10), (10, 4, 12), (3, 6, 6), (10, 0, 10), (10, 1, 10), (10, 40, 10)],
)
def test_measured_steps_are_rounded_up_to_whole_worker_bursts(steps, burst, whole):
    assert in_bursts(steps, burst) == whole
