"""The line profile of a job: for each line of the user's code, its share of a step.

Every sample of every rank belongs to one entry: a rank, a stack, the state of the rank's timeline
and what the thread did. All other figures are sums of entries, so they agree with each other.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from ...record.experiments.lines.sidecar import Activity
from ..records.rank_lines import SampledLine

__all__ = [
    "Activity",
    "Doing",
    "Entry",
    "LineProfile",
    "LineTime",
    "SampledLine",
    "Stack",
    "WorkerLine",
]


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
