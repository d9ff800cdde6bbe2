"""When a rank that is slower than the others is slower: always, from some step on, or at times."""

import numpy as np

from ..figures.measured_window import MeasuredWindow
from ..figures.steps import find_steps, states_by_step
from ..records.state_timeline import STATES

OWN = [STATES.index(name) for name in ("useful", "other")]
ALWAYS = 0.8  # of the steps
LEAST = 0.05  # of a step: less is no excess


def lateness(m: MeasuredWindow, rank: int) -> str:
    """In words, for the rank of that number; empty where the record can't tell."""
    steps = find_steps(m)
    numbers = [record.rank for record in m.records]
    if steps is None or rank not in numbers or len(numbers) < 2 or len(steps) < 5:
        return ""
    own = (
        np.stack([states_by_step(m, steps, i)[:, OWN].sum(axis=1) for i in range(len(numbers))])
        / 1e9
    )
    mine = numbers.index(rank)
    excess = own[mine] - np.median(np.delete(own, mine, axis=0), axis=0)
    least = max(0.5 * float(np.percentile(excess, 90)), LEAST * float(np.median(steps.seconds)))
    slow = np.flatnonzero(excess > least)
    if not len(slow):
        return ""
    share, first = len(slow) / len(steps), int(slow[0])
    if share >= ALWAYS:
        return "in all its steps"
    if first and len(slow) >= ALWAYS * (len(steps) - first):
        return f"from step {steps.first + first} on"
    return f"in {len(slow)} of {len(steps)} steps"
