"""Measure what the ranks exchange in a step: their gradients, and all collectives by call site."""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...record.experiments.lines.sidecar import CollectiveKind
from ...record.ring.states import Op, State
from ..figures.losses import collective_name
from ..figures.measured_window import MeasuredWindow
from ..records.rank_lines import SampledLine
from ..records.state_timeline import blocking_states, count_steps, total

# Gradients: during the backward or after it, in how many calls of which size, and in which of an
# optimizer step's backwards.

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


# Collectives by call site


class CallSite(NamedTuple):
    """A call site of collectives of one kind. what: the function of torch that it calls."""

    kind: CollectiveKind
    op: Op
    line: SampledLine | None
    what: str


@dataclass(frozen=True)
class ExchangedCalls:
    """The collectives of one place.

    Attributes:
        calls: Calls in a step of a mean rank.
        bytes: Bytes of a mean call.
        transfer, wait: Shares of all ranks' time in the window, as in Loss. A wait is for a rank
            that came last.
    """

    site: CallSite
    calls: float
    bytes: float
    transfer: float
    wait: float

    @property
    def name(self) -> str:
        """Name of the collective as in the report."""
        return collective_name(self.site.op)


def measure_exchanged_calls(m: MeasuredWindow) -> list[ExchangedCalls]:
    """Return the collectives of the window by place, those with most time first.

    Empty if a rank's profile has none of them.
    """
    if any(record.profile is None for record in m.records):
        return []
    sums: dict[CallSite, np.ndarray[tuple[int], np.dtype[np.float64]]]
    sums = defaultdict(lambda: np.zeros(4))  # calls, bytes, transfer, wait
    steps, whole = 0, len(m.records) * m.within.length
    exposed = m.blocked.by_record(m.matched.waits, len(m.records))
    for record, (wait, transfer) in zip(m.records, exposed, strict=True):
        found = record.profile
        assert found is not None
        steps += count_steps(record, m.within)
        sites = {(group, number): site for group, number, site in found.collectives.tolist()}
        events = record.events_in(*blocking_states(record))
        counted: set[tuple[int, int, int]] = set()
        places: dict[tuple[int, int], CallSite] = {}
        for at in np.flatnonzero((transfer > 0) | (wait > 0)).tolist():
            key = (int(events["group"][at]), int(events["seq"][at]))
            number = sites.get(key)
            if number is None:
                continue
            place = (number, int(events["op"][at]))
            if place not in places:
                one = found.collective_sites[number]
                stack = found.stacks[one.stack]
                line = found.lines[stack.lines[0]] if stack.lines else None
                places[place] = CallSite(one.kind, Op(place[1]), line, stack.what)
            into = sums[places[place]]
            into[2:] += [int(transfer[at]), int(wait[at])]
            one_call = (*key, place[1])  # a send and a receive may have the same number
            if one_call not in counted:
                counted.add(one_call)
                into[:2] += [1, found.collective_sites[number].bytes_per_call]
    if not steps:
        return []
    result = [
        ExchangedCalls(site, calls / steps, size / calls, transfer_ns / whole, wait_ns / whole)
        for site, (calls, size, transfer_ns, wait_ns) in (
            (site, one.tolist()) for site, one in sums.items()
        )
    ]
    return sorted(result, key=lambda one: -(one.transfer + one.wait))
