"""How gradients are exchanged: in the backward or after it, in how many calls of which size, and
in which of an optimizer step's backwards."""

from dataclasses import dataclass

import numpy as np

from ...record.ring.states import Op, State
from ..figures.measured_window import MeasuredWindow
from ..records.state_timeline import total

REDUCES = (Op.ALL_REDUCE, Op.REDUCE_SCATTER)


@dataclass(frozen=True)
class Gradients:
    """Of a mean rank's optimizer step: its backwards, those in which something was reduced, calls
    and bytes of these, and what was reduced outside of any backward."""

    backwards: float
    exchanging: float
    calls: float
    bytes: float
    calls_outside: float
    bytes_outside: float

    @property
    def a_call(self) -> float:
        """Bytes of one that was launched in a backward."""
        return self.bytes / self.calls if self.calls else 0.0


def gradients(m: MeasuredWindow) -> Gradients | None:
    """Of the window; None where it has no whole step."""
    sums, steps = np.zeros(6), 0
    for record in m.records:
        within = record.events_in(State.STEP)["end"]
        steps += int(((within > m.within.start) & (within <= m.within.end)).sum())
        back = record.events_in(State.BACKWARD)
        back = back[(back["start"] >= m.within.start) & (back["end"] <= m.within.end)]
        back = back[np.argsort(back["start"], kind="stable")]
        calls = record.events_in(State.COLLECTIVE)
        calls = calls[np.isin(calls["op"], REDUCES)]
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
    return Gradients(*(sums / steps).tolist()) if steps else None
