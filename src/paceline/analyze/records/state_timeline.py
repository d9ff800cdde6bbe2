"""Assign every instant of a rank's window to exactly one state of docs/reference/measures.md.

Events overlap (a blocked wait lies inside a backward, input inside a validation). Of all events
that cover an instant the one that comes first in ``ORDER`` counts. A rank's window becomes a line
of segments, each in one state, so the states add up to it exactly, in whole nanoseconds.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...record.ring.states import BLOCKING_STATES, SAMPLER_STATES, USEFUL_STATES, State
from .read_record import Record

Ints = npt.NDArray[np.int64]
Spans = tuple[Ints, Ints]  # starts and ends

ORDER = ("wait", "transfer", "checkpoint", "validation", "input", "useful")
STATES = ("useful", "input", "checkpoint", "validation", "other", "wait", "transfer")
OTHER = STATES.index("other")
COMMUNICATION = (STATES.index("wait"), STATES.index("transfer"))


def blocking(record: Record) -> tuple[State, ...]:
    """The events that may stand still for others. On a GPU they are kernels that communicate."""
    return (State.COMMUNICATION_KERNEL,) if record.on_gpu else BLOCKING_STATES


def useful(record: Record) -> tuple[State, ...]:
    """The events of computing for the model. On a GPU: the kernels that do not communicate."""
    return (State.KERNEL,) if record.on_gpu else USEFUL_STATES


def total(values: npt.NDArray[Any]) -> int:
    """Return the sum of integers that together may not fit 64 bits, exact below 2**53."""
    return int(values.sum(dtype=np.float64))


@dataclass(frozen=True)
class Window:
    """One interval on the common clock, the same for every rank (ns)."""

    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def window(records: list[Record], steps: tuple[int, int] | None = None) -> Window | None:
    """From the end of every rank's first step (the warm-up, or the first that a ring still
    holds) to the last event of all; None where a rank has fewer than two steps.

    steps: only steps from the first number up to, not including, the second.
    """
    ends = [record.of(State.STEP)[["step", "end"]] for record in records]
    if records and all(record.on_gpu for record in records):
        return _sampled(records)
    if not ends or min(len(step) for step in ends) < 2:
        return None
    start = max(int(step["end"][0]) for step in ends)
    end = max(int(r.events["end"][~np.isin(r.states, SAMPLER_STATES)].max()) for r in records)
    if steps is not None:
        first, last = steps
        before = [step["end"][step["step"] < max(first, 1)] for step in ends]
        inside = [step["end"][step["step"] < last] for step in ends]
        if any(not len(part) for part in (*before, *inside)):
            return None
        start = max(start, *(int(part.max()) for part in before))
        end = max(int(part.max()) for part in inside)
    return Window(start, end) if end > start else None


def _sampled(records: list[Record]) -> Window | None:
    """On GPUs: where the kernels of all ranks were looked at."""
    kernels = [record.of(State.KERNEL) for record in records]
    start = max(int(part["start"].min()) for part in kernels)
    end = min(int(part["end"].max()) for part in kernels)
    return Window(start, end) if end > start else None


def merged(start: Ints, end: Ints, within: Window) -> Spans:
    """The union of intervals, clipped to the window: apart from each other, in order."""
    start, end = np.maximum(start, within.start), np.minimum(end, within.end)
    real = end > start
    start, end = start[real], end[real]
    if not len(start):
        return start, end
    by_start = np.argsort(start, kind="stable")
    start, reached = start[by_start], np.maximum.accumulate(end[by_start])
    first = np.concatenate(([True], start[1:] > reached[:-1]))
    last = np.concatenate((first[1:], [True]))
    return start[first], reached[last]


@dataclass(frozen=True)
class Timeline:
    """A rank's window: segment i goes from edges[i] to edges[i + 1] and is in STATES[label[i]]."""

    edges: Ints
    label: npt.NDArray[np.int8]

    @property
    def states(self) -> dict[str, int]:
        """Nanoseconds of the window in each of STATES; they add up to its length."""
        ends = self.until([self.edges[-1]])[0]
        return dict(zip(STATES, ends.tolist(), strict=True))

    def until(self, times: Any) -> Ints:
        """Nanoseconds in each state from the window's start to each time: (times, states)."""
        total = np.zeros((len(self.edges), len(STATES)), np.int64)
        total[np.arange(1, len(self.edges)), self.label] = np.diff(self.edges)
        np.cumsum(total, axis=0, out=total)
        times = np.clip(np.asarray(times, np.int64), self.edges[0], self.edges[-1])
        at = np.minimum(np.searchsorted(self.edges, times, "right") - 1, len(self.label) - 1)
        result: Ints = total[at]
        result[np.arange(len(at)), self.label[at]] += times - self.edges[at]
        return result

    def busy_until(self, times: Any) -> Ints:
        """Nanoseconds outside communication from the window's start to each time."""
        busy = np.where(self.label >= COMMUNICATION[0], 0, np.diff(self.edges))  # the last two
        total = np.concatenate(([0], np.cumsum(busy)))
        times = np.clip(np.asarray(times, np.int64), self.edges[0], self.edges[-1])
        at = np.minimum(np.searchsorted(self.edges, times, "right") - 1, len(self.label) - 1)
        inside = np.where(busy[at] > 0, times - self.edges[at], 0)
        return np.asarray(total[at] + inside, np.int64)

    def at(self, times: Ints) -> npt.NDArray[np.int8]:
        """The state's number at each time of the window."""
        at = np.searchsorted(self.edges, times, "right") - 1
        return self.label[np.clip(at, 0, len(self.label) - 1)]


def timeline(record: Record, latest: Ints, within: Window) -> Timeline:
    """The states of one rank. latest: for each of its BLOCKED and CALL events, when the last
    member that it had to wait for arrived."""
    blocked = record.of(*blocking(record))
    turn = np.clip(latest, blocked["start"], blocked["end"])
    work = record.of(*useful(record))
    spans = {
        "wait": merged(blocked["start"], turn, within),
        "transfer": merged(turn, blocked["end"], within),
        "checkpoint": _of(record, State.CHECKPOINT, within),
        "validation": _of(record, State.VALIDATION, within),
        "input": _of(record, State.INPUT, within),
        "useful": merged(work["start"], work["end"], within),
    }
    # A device computes and communicates at a time: there what is covered by computing is hidden.
    order = ("useful", *ORDER[:-1]) if record.on_gpu else ORDER
    gaps = _input_gaps(record)
    lowest = merged(gaps["start"], gaps["end"], within)
    layers = [("input", lowest), *((name, spans[name]) for name in reversed(order))]
    ends = np.array([within.start, within.end])
    edges = np.unique(np.concatenate([ends, *(part for _, both in layers for part in both)]))
    label = np.full(len(edges) - 1, OTHER, np.int8)
    for name, (start, end) in layers:
        if len(start):
            at = np.searchsorted(start, edges[:-1], "right") - 1
            label[(at >= 0) & (edges[:-1] < end[at])] = STATES.index(name)
    return Timeline(edges, label)


def _of(record: Record, state: State, within: Window) -> Spans:
    row = record.of(state)
    return merged(row["start"], row["end"], within)


def _input_gaps(record: Record) -> npt.NDArray[Any]:
    """Gaps between steps of a script without DataLoader that are waits for input: those in
    which most samples of the stack were in a for statement's next; where the gap has no sample,
    as most of them say; where none has any, all."""
    gaps, samples = record.of(State.GAP), record.of(State.SAMPLE)
    if not len(gaps) or not len(samples):
        return gaps
    at = np.searchsorted(gaps["start"], samples["start"], "right") - 1
    inside = (at >= 0) & (samples["start"] < gaps["end"][at])
    at, iterates = at[inside], samples["peer"][inside] == 1
    if not len(at):
        return gaps
    votes = np.bincount(at, np.where(iterates, 1.0, -1.0), minlength=len(gaps))
    most = 1.0 if iterates.mean() >= 0.5 else -1.0
    sampled = np.bincount(at, minlength=len(gaps)) > 0
    return gaps[np.where(sampled, votes, most) >= 0]
