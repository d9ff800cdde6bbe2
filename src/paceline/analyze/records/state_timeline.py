"""Assign every instant of a rank's window to exactly one state.

The states are defined in docs/reference/measures.md.

Events overlap (a blocked wait lies inside a backward, input inside a validation). Of all events
that cover an instant, the first in ``STATE_PRIORITY`` counts. A rank's window becomes a sequence of
segments, each in one state, so the states add up to its length exactly, in whole nanoseconds.
The time in which the training thread had no core is taken out of the states in which it lay.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...record.ring.states import (
    BACKGROUND_STATES,
    BESIDE_STATES,
    BLOCKING_STATES,
    USEFUL_STATES,
    State,
)
from .core_waits import place_delays
from .read_record import Record

Ints = npt.NDArray[np.int64]
Intervals = tuple[Ints, Ints]  # starts and ends (ns)

STATE_PRIORITY = ("wait", "transfer", "bubble", "checkpoint", "validation", "input", "useful")
STATES = (
    *("useful", "input", "checkpoint", "validation", "starved", "other"),
    *("bubble", "wait", "transfer"),
)
STARVED, OTHER = STATES.index("starved"), STATES.index("other")
BUBBLE = STATES.index("bubble")  # the first of the states in which others block a rank
COMMUNICATION = (STATES.index("wait"), STATES.index("transfer"))


def blocking_states(record: Record) -> tuple[State, ...]:
    """Return the states in which others may block a rank. On a GPU: communication kernels."""
    return (State.COMMUNICATION_KERNEL,) if record.communicates_on_gpu else BLOCKING_STATES


def is_pipeline_group(name: str) -> bool:
    """Return whether a process group has the stages of one pipeline: waits in it are bubbles.

    Args:
        name: As ``read_record`` has it: "stage (data 0) #3".
    """
    axes = name.partition(" #")[0].partition(" (")[0].split(" x ")
    return "stage" in axes and "data" not in axes


def useful_states(record: Record) -> tuple[State, ...]:
    """Return the states of computing for the model. On a GPU: non-communication kernels."""
    return (State.KERNEL,) if record.on_gpu else USEFUL_STATES


def total(values: npt.NDArray[Any]) -> int:
    """Return the sum of integers as an int, also where it exceeds 64 bits. Exact below 2**53."""
    return int(values.sum(dtype=np.float64))


@dataclass(frozen=True)
class Window:
    """One interval on the common clock (ns), the same for every rank."""

    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def count_steps(record: Record, window: Window) -> int:
    """Return the number of steps of a record that end in the window."""
    ends = record.events_in(State.STEP)["end"]
    return int(np.count_nonzero((ends > window.start) & (ends <= window.end)))


def find_window(records: list[Record], steps: tuple[int, int] | None = None) -> Window | None:
    """Return the measured window, or None where a rank has fewer than two steps.

    It lasts from the end of every rank's first step (the warm-up step, or the first one that the
    ring still holds) to the last event of any rank. ``steps``: (first, last) restricts the window
    to the steps from ``first`` up to, not including, ``last``.
    """
    step_ends = [record.events_in(State.STEP)[["step", "end"]] for record in records]
    if records and all(record.on_gpu for record in records):
        return _kernel_window(records)
    if not step_ends or min(len(step) for step in step_ends) < 2:
        return None
    start = max(int(step["end"][0]) for step in step_ends)
    beside = (*BESIDE_STATES, *BACKGROUND_STATES)
    end = max(int(r.events["end"][~np.isin(r.states, beside)].max()) for r in records)
    if steps is not None:
        first, last = steps
        ends_before = [step["end"][step["step"] < max(first, 1)] for step in step_ends]
        ends_until = [step["end"][step["step"] < last] for step in step_ends]
        if any(not len(part) for part in (*ends_before, *ends_until)):
            return None
        start = max(start, *(int(part.max()) for part in ends_before))
        end = max(int(part.max()) for part in ends_until)
    return Window(start, end) if end > start else None


def _kernel_window(records: list[Record]) -> Window | None:
    """Return the window in which the kernels of all ranks were recorded."""
    kernels = [record.events_in(State.KERNEL) for record in records]
    start = max(int(rank_kernels["start"].min()) for rank_kernels in kernels)
    end = min(int(rank_kernels["end"].max()) for rank_kernels in kernels)
    return Window(start, end) if end > start else None


def merge_intervals(start: Ints, end: Ints, window: Window) -> Intervals:
    """Return the union of intervals, clipped to the window: disjoint and in order of time."""
    start, end = np.maximum(start, window.start), np.minimum(end, window.end)
    not_empty = end > start
    start, end = start[not_empty], end[not_empty]
    if not len(start):
        return start, end
    by_start = np.argsort(start, kind="stable")
    start, latest_end = start[by_start], np.maximum.accumulate(end[by_start])
    first = np.concatenate(([True], start[1:] > latest_end[:-1]))
    last = np.concatenate((first[1:], [True]))
    return start[first], latest_end[last]


@dataclass(frozen=True)
class Timeline:
    """One rank's window: segment i is [edges[i], edges[i + 1]) and in STATES[label[i]].

    ``underlying`` is the same without the state starved: what the rank did, with or without a core.
    """

    edges: Ints
    label: npt.NDArray[np.int8]
    underlying: npt.NDArray[np.int8]

    @property
    def states(self) -> dict[str, int]:
        """Nanoseconds of the window in each of STATES; they add up to its length."""
        ends = self.cumulative_by_state([self.edges[-1]])[0]
        return dict(zip(STATES, ends.tolist(), strict=True))

    def cumulative_by_state(self, times: Any) -> Ints:
        """Return ns in each state from the window's start to each time, shape (times, states)."""
        cumulative = np.zeros((len(self.edges), len(STATES)), np.int64)
        cumulative[np.arange(1, len(self.edges)), self.label] = np.diff(self.edges)
        np.cumsum(cumulative, axis=0, out=cumulative)
        times = np.clip(np.asarray(times, np.int64), self.edges[0], self.edges[-1])
        segment = np.minimum(np.searchsorted(self.edges, times, "right") - 1, len(self.label) - 1)
        result: Ints = cumulative[segment]
        result[np.arange(len(segment)), self.label[segment]] += times - self.edges[segment]
        return result

    def cumulative_unblocked(self, times: Any) -> Ints:
        """Return ns in which no other rank blocks this one, from the window's start on."""
        # bubble, wait and transfer are the last three of STATES
        return self._cumulative(self.label < BUBBLE, times)

    def cumulative_busy(self, times: Any) -> Ints:
        """Return ns outside wait and transfer from the window's start to each time."""
        # Wait and transfer are the last two of STATES.
        return self._cumulative(self.label < COMMUNICATION[0], times)

    def cumulative_in(self, state: str, times: Any) -> Ints:
        """Return ns in one of STATES from the window's start to each time."""
        return self._cumulative(self.label == STATES.index(state), times)

    def _cumulative(self, counts: npt.NDArray[np.bool_], times: Any) -> Ints:
        """Return ns in the segments that count, from the window's start to each time."""
        length = np.where(counts, np.diff(self.edges), 0)
        cumulative = np.concatenate(([0], np.cumsum(length)))
        times = np.clip(np.asarray(times, np.int64), self.edges[0], self.edges[-1])
        segment = np.minimum(np.searchsorted(self.edges, times, "right") - 1, len(self.label) - 1)
        in_segment = np.where(counts[segment], times - self.edges[segment], 0)
        return np.asarray(cumulative[segment] + in_segment, np.int64)

    @property
    def starved_in(self) -> dict[str, int]:
        """Nanoseconds without a core, by the state in which they lay."""
        starved = self.label == STARVED
        lengths, states = np.diff(self.edges)[starved], self.underlying[starved]
        return {STATES[i]: total(lengths[states == i]) for i in np.unique(states).tolist()}

    def underlying_at(self, times: Ints) -> npt.NDArray[np.int8]:
        """Return the index in STATES of what the rank did at each time, with or without a core."""
        segment = np.searchsorted(self.edges, times, "right") - 1
        return self.underlying[np.clip(segment, 0, len(self.label) - 1)]


def build_timeline(record: Record, latest: Ints, window: Window) -> Timeline:
    """Return the states of one rank.

    ``latest``: for each of its BLOCKED and CALL events, the time at which the last member that it
    had to wait for arrived (ns).
    """
    blocked = record.events_in(*blocking_states(record))
    last_arrival = np.clip(latest, blocked["start"], blocked["end"])
    groups = record.meta.get("groups", {})
    pipelines = [int(n) for n, group in groups.items() if is_pipeline_group(group["name"])]
    in_pipeline = np.isin(blocked["group"], pipelines)
    waits = {
        name: merge_intervals(blocked["start"][of], last_arrival[of], window)
        for name, of in (("bubble", in_pipeline), ("wait", ~in_pipeline))
    }
    useful_events = record.events_in(*useful_states(record))
    intervals = {
        **waits,
        "transfer": merge_intervals(last_arrival, blocked["end"], window),
        "checkpoint": _state_intervals(record, State.CHECKPOINT, window),
        "validation": _state_intervals(record, State.VALIDATION, window),
        "input": _state_intervals(record, State.INPUT, window),
        "useful": merge_intervals(useful_events["start"], useful_events["end"], window),
    }
    # A GPU computes and communicates at the same time: communication under computing is overlap.
    order = ("useful", *STATE_PRIORITY[:-1]) if record.on_gpu else STATE_PRIORITY
    gaps = _input_gaps(record)
    gap_intervals = merge_intervals(gaps["start"], gaps["end"], window)
    layers = [("input", gap_intervals), *((name, intervals[name]) for name in reversed(order))]
    ends = np.array([window.start, window.end])
    edges = np.unique(np.concatenate([ends, *(bound for _, bounds in layers for bound in bounds)]))
    label = np.full(len(edges) - 1, OTHER, np.int8)
    for name, (start, end) in layers:
        if len(start):
            segment = np.searchsorted(start, edges[:-1], "right") - 1
            label[(segment >= 0) & (edges[:-1] < end[segment])] = STATES.index(name)
    return _without_core_waits(record, edges, label)


def _without_core_waits(record: Record, edges: Ints, label: npt.NDArray[np.int8]) -> Timeline:
    """Return the timeline of these segments, with the waits for a core taken out of their states.

    A thread that is blocked does not ask for a core. On a GPU, a delay of the thread costs nothing
    while kernels compute.
    """
    start, end = place_delays(record, edges, label < BUBBLE)
    cuts = np.unique(np.concatenate([edges, start, end]))
    underlying = label[np.searchsorted(edges, cuts[:-1], "right") - 1]
    if not len(start):
        return Timeline(cuts, underlying, underlying)
    delay = np.searchsorted(start, cuts[:-1], "right") - 1
    starved = (delay >= 0) & (cuts[:-1] < end[delay])
    if record.on_gpu:
        starved &= underlying != STATES.index("useful")
    return Timeline(cuts, np.where(starved, STARVED, underlying).astype(np.int8), underlying)


def mostly_starved_in(timelines: Iterable[Timeline]) -> str | None:
    """Return the state in which the ranks lost most time by waits for a core; None without."""
    spent = dict.fromkeys(STATES, 0)
    for line in timelines:
        for state, ns in line.starved_in.items():
            spent[state] += ns
    return max(spent, key=spent.__getitem__) if any(spent.values()) else None


def background_ns(record: Record, window: Window) -> int:
    """Return for how long another thread than the training one waited for a collective (ns)."""
    start, end = _state_intervals(record, State.BACKGROUND_BLOCKED, window)
    return total(end - start)


def _state_intervals(record: Record, state: State, window: Window) -> Intervals:
    events = record.events_in(state)
    return merge_intervals(events["start"], events["end"], window)


def _input_gaps(record: Record) -> npt.NDArray[Any]:
    """Return the gaps between steps that are waits for input, in a script without DataLoader.

    A gap counts where most of its stack samples were in the ``next`` of a ``for`` statement. A gap
    without samples is decided by the majority of all samples. Without any sample all gaps count.
    """
    gaps, samples = record.events_in(State.GAP), record.events_in(State.SAMPLE)
    if not len(gaps) or not len(samples):
        return gaps
    gap = np.searchsorted(gaps["start"], samples["start"], "right") - 1
    in_gap = (gap >= 0) & (samples["start"] < gaps["end"][gap])
    gap, in_next = gap[in_gap], samples["peer"][in_gap] == 1
    if not len(gap):
        return gaps
    votes = np.bincount(gap, np.where(in_next, 1.0, -1.0), minlength=len(gaps))
    majority = 1.0 if in_next.mean() >= 0.5 else -1.0
    has_samples = np.bincount(gap, minlength=len(gaps)) > 0
    return gaps[np.where(has_samples, votes, majority) >= 0]
