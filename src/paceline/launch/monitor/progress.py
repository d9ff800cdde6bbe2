"""Detect whether the ranks of this node make progress.

A rank makes progress when it begins or ends a recorded operation. Before its first training step,
when it still imports, compiles or loads data, it also counts as progressing while it uses the CPU.
Without a record, no step is known, so this holds until the end.
The launcher compares the reports of all nodes with ``--hang-timeout``.
"""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from ...record.ring.tail import read_progress
from ...security.processes import stat_fields
from ..linux_processes import child_pids
from . import rank_stacks

BUSY_CPU_SHARE = 0.5  # of one core: the rank is computing
STARTUP_CPU_SHARE = 0.2  # of one core, before the first step: importing or compiling
_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class ProgressReport:
    """What one node reports about the progress of its ranks.

    Attributes:
        idle_s: Seconds since any rank last began or ended an operation.
        longest_idle_s: Longest such interval that ended, since the first step.
        has_stepped: Whether any rank has completed a training step.
        busy_ranks: Global ranks that have used the CPU during the current idle interval.
        has_record: Whether any rank has a record. Without one, its steps are not known.
    """

    idle_s: float = 0.0
    longest_idle_s: float = 0.0
    has_stepped: bool = False
    busy_ranks: list[int] = field(default_factory=list)
    has_record: bool = True


class ProgressMonitor:
    """Poll the records and the CPU time of one node's ranks."""

    def __init__(self, job_folder: Path) -> None:
        self._job_folder = job_folder
        self._last_events: dict[str, tuple[bytes, int]] = {}
        self._last_progress = self._last_poll = time.monotonic()
        self._cpu_seconds_at_progress: dict[int, float] = {}  # by rank
        self._cpu_seconds_at_poll: dict[int, float] = {}  # by rank
        self._longest_idle_s, self._has_stepped = 0.0, False

    def reset(self) -> None:
        """Forget everything seen so far; called when the job is restarted."""
        self._last_events, self._last_progress = {}, time.monotonic()
        self._longest_idle_s, self._has_stepped = 0.0, False

    def poll(self) -> ProgressReport:
        """Return the progress since the previous call."""
        now, cpu_seconds = time.monotonic(), self._cpu_seconds_by_rank()
        progressed = self._records_changed()
        elapsed_s = max(now - self._last_poll, 1e-3)
        if not self._has_stepped:
            cpu_seconds_used = [
                cpu_seconds[rank] - self._cpu_seconds_at_poll.get(rank, cpu_seconds[rank])
                for rank in cpu_seconds
            ]
            progressed = progressed or any(
                used / elapsed_s >= STARTUP_CPU_SHARE for used in cpu_seconds_used
            )
        if progressed:
            # The interval lasted at least until the previous poll; when exactly it ended is not
            # known, so it is not overestimated.
            if self._has_stepped:
                self._longest_idle_s = max(
                    self._longest_idle_s, self._last_poll - self._last_progress
                )
            self._last_progress, self._cpu_seconds_at_progress = now, cpu_seconds
        self._last_poll, self._cpu_seconds_at_poll = now, cpu_seconds
        idle_s = now - self._last_progress
        busy_ranks = [
            rank
            for rank, seconds in cpu_seconds.items()
            if idle_s > 0
            and seconds - self._cpu_seconds_at_progress.get(rank, seconds)
            >= BUSY_CPU_SHARE * idle_s
        ]
        return ProgressReport(
            *(idle_s, self._longest_idle_s, self._has_stepped, sorted(busy_ranks)),
            has_record=bool(self._last_events),
        )

    def _records_changed(self) -> bool:
        """Whether any rank's last begun or last ended operation differs from the previous poll."""
        events = {}
        for path in self._job_folder.glob("rank-*.ring"):
            try:
                last_begun, last_ended, step = read_progress(path)
            except (OSError, ValueError):
                continue
            # If only stack samples were read, no operation has ended since.
            last_ended = last_ended or self._last_events.get(path.name, (b"", 0))[1]
            events[path.name] = (last_begun, last_ended)
            self._has_stepped = self._has_stepped or step > 0
        changed = events != self._last_events
        self._last_events = events
        return changed

    def _cpu_seconds_by_rank(self) -> dict[int, float]:
        """Return the CPU seconds of each rank and its descendants (loader workers, compilers)."""
        return {
            rank: _process_cpu_seconds(pid)
            for rank, pid in rank_stacks.pids(self._job_folder).items()
        }


def _process_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants."""
    ticks = sum(map(int, stat_fields(pid)[11:15]))  # 0 if it has ended
    return ticks / _CLOCK_TICKS_PER_S + sum(map(_process_cpu_seconds, child_pids(pid)))
