"""The line profile of a job: for each line of the user's code, its share of a step.

Every sample of every rank belongs to one entry: a rank, a stack, the state of the rank's timeline
and what the thread did. All other figures are sums of entries, so they agree with each other.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from ...record.experiments.lines.sidecar import Activity
from ..figures.losses import attributed_waits, last_together, rows_by_value
from ..figures.measured_window import MeasuredWindow
from ..records.rank_lines import RankLines, SampledLine, SampledStack
from ..records.state_timeline import STATES


class Doing(StrEnum):
    """What a line's time went to. Those of ``Activity`` have the same names."""

    PYTHON = "python"
    LIBRARY = "library"
    TORCH = "torch"
    SHORT_CALLS = "short calls"  # of torch, many in a step: Python's overhead, not operators
    FILE = "file"
    WAIT = "wait"
    COLLECTIVE = "collective"
    CORE = "waiting for a core"
    GARBAGE = "garbage collection"


class Entry(NamedTuple):
    """One kind of time. stack: Number in ``LineProfile.stacks``."""

    rank: int
    stack: int
    state: str
    doing: Doing


@dataclass(frozen=True)
class Stack:
    """A chain of lines, innermost first, and the function or the path that the innermost used."""

    lines: tuple[SampledLine, ...]
    what: str


@dataclass(frozen=True)
class LineTime:
    """Time of one line.

    Attributes:
        own: Share of a step in which the line is the innermost one of the user's code, by rank.
        inclusive: Share of a step in which it is on the stack, by rank.
        doing: Shares of what it did, mean of the ranks; they add up to the mean of ``own``.
        what: The function or the path that most of ``own`` used; "" for Python itself.
        executions: In one step; None if they were not counted.
    """

    line: SampledLine
    own: list[float]
    inclusive: list[float]
    doing: dict[Doing, float]
    what: str
    executions: float | None

    @property
    def share(self) -> float:
        return sum(self.own) / len(self.own)

    @property
    def inclusive_share(self) -> float:
        return sum(self.inclusive) / len(self.inclusive)

    @property
    def main_activity(self) -> Doing:
        return max(self.doing, key=lambda doing: self.doing[doing])


@dataclass(frozen=True)
class WorkerLine:
    """A line in the loader workers. share: Of the workers' time."""

    line: SampledLine
    share: float
    doing: Doing
    what: str


@dataclass
class LineProfile:
    """Line profile of one or more runs of the unchanged script.

    Attributes:
        ranks: Numbers of the ranks.
        samples: Number of samples of all ranks.
        stacks: All distinct stacks.
        times: Share of a step, by entry; those of a rank add up to 1.
        waited: Share of all ranks' time in which others waited for a rank, by the rank and the
            line with which it was busy in that time, and the others were not.
        executions: Of lines in one step.
        workers: Share of the loader workers' time, by stack and what they did.
    """

    ranks: list[int]
    samples: int = 0
    stacks: list[Stack] = field(default_factory=list)
    times: dict[Entry, float] = field(default_factory=dict)
    waited: dict[int, dict[SampledLine, float]] = field(default_factory=dict)
    executions: dict[SampledLine, float] = field(default_factory=dict)
    workers: dict[tuple[int, Doing], float] = field(default_factory=dict)

    def share(self, entries: Iterable[Entry]) -> float:
        """Return the share of a step of these entries, mean of the ranks."""
        return sum(self.times[entry] for entry in entries) / len(self.ranks)

    def own_line(self, entry: Entry) -> SampledLine | None:
        """Return the innermost line of the user's code; None if there is none on the stack."""
        lines = self.stacks[entry.stack].lines
        return lines[0] if lines else None

    def lines(self, entries: Iterable[Entry] | None = None) -> list[LineTime]:
        """Return the lines of these entries (default: all), those with most own time first."""
        chosen = self.times if entries is None else list(entries)
        own: dict[SampledLine, list[Entry]] = defaultdict(list)
        inclusive: dict[SampledLine, list[Entry]] = defaultdict(list)
        for entry in chosen:
            lines = self.stacks[entry.stack].lines
            for line in dict.fromkeys(lines):
                inclusive[line].append(entry)
            if lines:
                own[lines[0]].append(entry)
        found = [self._line_time(line, own[line], entries) for line, entries in inclusive.items()]
        return sorted(found, key=lambda one: (-one.share, -one.inclusive_share))

    def _line_time(self, line: SampledLine, own: list[Entry], entries: list[Entry]) -> LineTime:
        doing: dict[Doing, float] = defaultdict(float)
        what: dict[str, float] = defaultdict(float)
        for entry in own:
            doing[entry.doing] += self.times[entry] / len(self.ranks)
            what[self.stacks[entry.stack].what] += self.times[entry]
        return LineTime(
            line,
            self._by_rank(own),
            self._by_rank(entries),
            dict(sorted(doing.items(), key=lambda both: -both[1])),
            max(what, key=lambda name: what[name], default=""),
            self.executions.get(line),
        )

    def _by_rank(self, entries: Iterable[Entry]) -> list[float]:
        sums = dict.fromkeys(self.ranks, 0.0)
        for entry in entries:
            sums[entry.rank] += self.times[entry]
        return list(sums.values())

    def worker_lines(self) -> list[WorkerLine]:
        """Return the lines of the loader workers, those with most time first."""
        sums: dict[SampledLine, dict[tuple[Doing, str], float]] = defaultdict(dict)
        for (stack, doing), share in self.workers.items():
            if self.stacks[stack].lines:
                of_line = sums[self.stacks[stack].lines[0]]
                key = (doing, self.stacks[stack].what)
                of_line[key] = of_line.get(key, 0.0) + share
        found = [
            WorkerLine(line, sum(kinds.values()), *max(kinds, key=lambda kind: kinds[kind]))
            for line, kinds in sums.items()
        ]
        return sorted(found, key=lambda one: -one.share)


# Build the line profile of a job from the records of its runs.

MIN_OFF_CORE = 0.5  # of the time of Python code: then it waits for something that is not known
MIN_EXECUTIONS = 30  # of a line in a step: then it is in a loop
SHORT_EXECUTION_S = 3e-4  # a shorter execution of a line with operators is mostly Python's overhead


def profile_of_runs(windows: Sequence[MeasuredWindow], step_s: float) -> LineProfile | None:
    """Return the mean profile of several runs of the same ranks; None without samples.

    step_s: Mean duration of a step.
    """
    usable = [m for m in windows if all(record.profile for record in m.records)]
    if not usable:
        return None
    builder = _Builder([record.rank for record in usable[0].records])
    for measured in usable:
        builder.add(measured, 1 / len(usable))
    profile = builder.finished(step_s)
    for measured in usable:
        add_waits(profile, measured, 1 / len(usable))
    return profile


class _Builder:
    """Adds up the profiles of runs, whose stacks have different numbers."""

    def __init__(self, ranks: list[int]) -> None:
        self.profile = LineProfile(ranks)
        self._numbers: dict[Stack, int] = {}

    def add(self, m: MeasuredWindow, weight: float) -> None:
        executions: dict[SampledLine, list[int]] = defaultdict(list)
        times: dict[Entry, float] = defaultdict(float, self.profile.times)
        for record, timeline in zip(m.records, m.timelines, strict=True):
            rank_lines = record.profile
            assert rank_lines is not None
            numbers = [self._number(rank_lines, stack) for stack in rank_lines.stacks]
            inside = np.flatnonzero(
                (rank_lines.at > m.within.start) & (rank_lines.at <= m.within.end)
            )
            self.profile.samples += len(inside)
            whole = float(rank_lines.weight[inside].sum())
            states = timeline.underlying_at(rank_lines.at[inside] - 1)
            for i, state in zip(inside.tolist(), states.tolist(), strict=True):
                stack = int(rank_lines.stack[i])
                share = weight * float(rank_lines.weight[i]) / whole
                for doing, part in _doings(rank_lines, i, rank_lines.stacks[stack], STATES[state]):
                    entry = Entry(record.rank, numbers[stack], STATES[state], doing)
                    times[entry] += share * part
            for number, count in rank_lines.executions.items():
                executions[rank_lines.lines[number]].append(count)
            self._add_workers(rank_lines, numbers, weight / len(m.records))
        self.profile.times = {entry: share for entry, share in times.items() if share > 0}
        for line, counts in executions.items():
            most = max(self.profile.executions.get(line, 0.0), sum(counts) / len(counts))
            self.profile.executions[line] = most

    def _add_workers(self, rank_lines: RankLines, numbers: list[int], weight: float) -> None:
        if not rank_lines.worker_ns:
            return
        for stack, ns in rank_lines.worker_times:
            key = (numbers[stack], Doing(rank_lines.stacks[stack].activity))
            share = weight * ns / rank_lines.worker_ns
            self.profile.workers[key] = self.profile.workers.get(key, 0.0) + share

    def _number(self, of: RankLines, stack: SampledStack) -> int:
        known = Stack(tuple(of.lines[number] for number in stack.lines), stack.what)
        if known not in self._numbers:
            self._numbers[known] = len(self._numbers)
            self.profile.stacks.append(known)
        return self._numbers[known]

    def finished(self, step_s: float) -> LineProfile:
        """Return the profile, in which lines with many short calls of torch are known as such."""
        profile, torch_time = self.profile, defaultdict[SampledLine | None, float](float)
        for entry in profile.times:
            if entry.doing == Doing.TORCH:
                torch_time[profile.own_line(entry)] += profile.share([entry])
        short = {
            line
            for line, share in torch_time.items()
            if line is not None
            and (count := profile.executions.get(line, 0.0)) >= MIN_EXECUTIONS
            and share * step_s <= SHORT_EXECUTION_S * count
        }
        times: dict[Entry, float] = defaultdict(float)
        for entry, share in profile.times.items():
            if entry.doing == Doing.TORCH and profile.own_line(entry) in short:
                entry = Entry(entry.rank, entry.stack, entry.state, Doing.SHORT_CALLS)
            times[entry] += share
        profile.times = dict(times)
        return profile


def _doings(of: RankLines, sample: int, stack: SampledStack, state: str) -> list[tuple[Doing, Any]]:
    """Return what a sample's time went to, with the part of each."""
    if state in ("wait", "transfer"):
        return [(Doing.COLLECTIVE, 1.0)]
    doing = Doing(stack.activity)
    # The time since the previous sample is the line's own only if that was in the same line.
    before = of.stacks[int(of.stack[sample - 1])] if sample else stack
    off_core = float(of.off_core[sample]) if before.lines[:1] == stack.lines[:1] else 0.0
    if stack.activity in (Activity.PYTHON, Activity.LIBRARY) and off_core > MIN_OFF_CORE:
        doing = Doing.WAIT
    core, garbage = float(of.core_wait[sample]), float(of.garbage[sample])
    parts = [(Doing.CORE, core), (Doing.GARBAGE, garbage), (doing, 1 - core - garbage)]
    return [(kind, part) for kind, part in parts if part > 0]


# Find the lines with which a rank was busy while the other ranks waited for it.
#
# A wait is booked to the rank that arrived last. What that rank does during the wait says less
# than what it did more of than the waiting rank since both were last together: a rank that is
# late in its own work already computes the backward when the others begin to wait.

MAX_WAITS = 4000  # of each late rank, the longest ones


def add_waits(profile: LineProfile, m: MeasuredWindow, weight: float) -> None:
    """Add the waits of a run to ``profile.waited``, times ``weight``."""
    if m.clocks_unaligned:
        return
    rows = m.matched.waits
    known = np.flatnonzero(attributed_waits(m.matched, m.blocked, m.within, m.residual_ns))
    start = np.clip(rows["start"], m.within.start, m.within.end)
    together = np.clip(last_together(rows), m.within.start, start)
    arrival = np.clip(np.minimum(rows["latest"], rows["end"]), start, m.within.end)
    whole = len(m.records) * m.within.length
    for culprit, of_culprit in rows_by_value(rows["culprit"][known]):
        waits = known[of_culprit]
        waits = waits[np.argsort(-m.blocked.wait[waits], kind="stable")][:MAX_WAITS]
        waited = float(m.blocked.wait[waits].sum()) / whole
        excess: dict[SampledLine, float] = defaultdict(float)
        for wait in waits.tolist():
            length = max(int(arrival[wait] - together[wait]), 1)
            scale = float(m.blocked.wait[wait]) / length
            late, waiting = m.records[culprit].profile, m.records[rows["record"][wait]].profile
            assert late is not None
            assert waiting is not None
            _add_lines(excess, late, int(together[wait]), int(arrival[wait]), scale)
            _add_lines(excess, waiting, int(together[wait]), int(start[wait]), -scale)
        positive = {line: value for line, value in excess.items() if value > 0}
        found = profile.waited.setdefault(m.records[culprit].rank, {})
        for line, value in positive.items():
            share = weight * waited * value / sum(positive.values())
            found[line] = found.get(line, 0.0) + share


def _add_lines(
    sums: dict[SampledLine, float], of: RankLines, start: int, end: int, scale: float
) -> None:
    """Add the time of the innermost lines between two times, times ``scale``."""
    first, last = np.searchsorted(of.at, [start, end], "right")
    for sample in range(int(first), int(last)):
        lines = of.stacks[int(of.stack[sample])].lines
        if lines:
            sums[of.lines[lines[0]]] += scale * float(of.weight[sample])
