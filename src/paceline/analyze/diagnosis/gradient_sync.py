"""Measure how gradients are synchronized.

During the backward or after it, in how many calls of which size, and in which of an optimizer
step's backwards.
"""

from dataclasses import dataclass

import numpy as np

from ...record.ring.states import Op, State
from ..figures.measured_window import MeasuredWindow
from ..records.state_timeline import count_steps, total

REDUCTION_OPS = (Op.ALL_REDUCE, Op.REDUCE_SCATTER)


@dataclass(frozen=True)
class GradientSync:
    """Gradient synchronization of a mean rank's optimizer step.

    Attributes:
        backwards: Backwards per optimizer step.
        exchanging: Backwards in which something was reduced.
        calls, bytes: Reductions launched in a backward.
        calls_outside, bytes_outside: Reductions launched outside of any backward.
    """

    backwards: float
    exchanging: float
    calls: float
    bytes: float
    calls_outside: float
    bytes_outside: float

    @property
    def bytes_per_call(self) -> float:
        """Bytes per reduction that was launched in a backward."""
        return self.bytes / self.calls if self.calls else 0.0


def measure_gradient_sync(m: MeasuredWindow) -> GradientSync | None:
    """Measure the window; None where it has no complete step."""
    sums, steps = np.zeros(6), 0
    for record in m.records:
        steps += count_steps(record, m.within)
        back = record.events_in(State.BACKWARD)
        back = back[(back["start"] >= m.within.start) & (back["end"] <= m.within.end)]
        back = back[np.argsort(back["start"], kind="stable")]
        calls = record.events_in(State.COLLECTIVE)
        calls = calls[np.isin(calls["op"], REDUCTION_OPS)]
        calls = calls[(calls["start"] >= m.within.start) & (calls["start"] < m.within.end)]
        at = np.searchsorted(back["start"], calls["start"], "right") - 1
        inside = (at >= 0) & (calls["start"] < back["end"][at]) if len(back) else at >= 0
        amount = calls["amount"]
        sums += [
            len(back),
            len(np.unique(at[inside])),
            int(inside.sum()),
            total(amount[inside]),
            int((~inside).sum()),
            total(amount[~inside]),
        ]
    return GradientSync(*(sums / steps).tolist()) if steps else None
