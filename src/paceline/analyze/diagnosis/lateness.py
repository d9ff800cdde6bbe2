"""Determine by how much ranks differ, and when a slow rank is slow: always, or in some steps."""

import numpy as np

from ...plurals import counted
from ...significance import RankSpread, rank_spread
from ..figures.measured_window import MeasuredWindow
from ..figures.steps import states_by_step, times_by_range
from ..records.state_timeline import STATES

COMPUTING = ("useful", "starved", "other")
OWN_STATES = [STATES.index(name) for name in COMPUTING]
MIN_NEARLY_ALL = 0.9  # of the steps, to be called slow in nearly all of them
MIN_SLOW_SHARE = 0.8  # of the steps after the first slow one, to be called slow since then
MIN_EXCESS = 0.05  # of a step


def computing_spread(m: MeasuredWindow) -> RankSpread | None:
    """Return the constant differences between the ranks' computing times, as shares of a step.

    None if there are fewer than two ranks.
    """
    times = times_by_range(m, COMPUTING)
    step_s = times_by_range(m, STATES).mean()
    if len(times) < 2 or not times.shape[1] or not step_s:
        return None
    return rank_spread(times / step_s)


def lateness(m: MeasuredWindow, rank: int) -> str:
    """Describe when this rank is slow; empty where the record can't tell."""
    steps = m.steps
    numbers = [record.rank for record in m.records]
    if steps is None or rank not in numbers or len(numbers) < 2 or len(steps) < 5:
        return ""
    own = (
        np.stack(
            [states_by_step(m, steps, i)[:, OWN_STATES].sum(axis=1) for i in range(len(numbers))]
        )
        / 1e9
    )
    mine = numbers.index(rank)
    excess = own[mine] - np.median(np.delete(own, mine, axis=0), axis=0)
    least = max(
        0.5 * float(np.percentile(excess, 90)), MIN_EXCESS * float(np.median(steps.seconds))
    )
    slow = np.flatnonzero(excess > least)
    if not len(slow):
        return ""
    share, first = len(slow) / len(steps), int(slow[0])
    if len(slow) == len(steps):
        return "in all its steps"
    if share >= MIN_NEARLY_ALL:
        return f"in nearly all its steps ({len(slow)} of {len(steps)})"
    if first and len(slow) >= MIN_SLOW_SHARE * (len(steps) - first):
        return f"from step {steps.first + first} on"
    return f"in {len(slow)} of {counted(len(steps), 'step')}"
