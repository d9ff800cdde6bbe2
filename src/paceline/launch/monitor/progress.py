"""Whether a job moves, as its host sees it: what its ranks have begun and ended, and before their
first step also whether they compute."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from ...record.ring.tail import read_progress
from . import rank_stacks

BUSY_CPU_SHARE = 0.5  # of a core: a rank that takes that much computes
STARTUP_CPU_SHARE = 0.2  # of a core, before the first step: imports, compilation
_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class ProgressReport:
    """still_s: for how long no rank has begun or ended anything. longest_s: the longest such
    time that came to an end, since the first step. busy: ranks that compute meanwhile."""

    idle_s: float = 0.0
    longest_idle_s: float = 0.0
    has_stepped: bool = False
    busy_ranks: list[int] = field(default_factory=list)


class ProgressMonitor:
    """Looks at one host's ranks, again and again."""

    def __init__(self, job_folder: Path) -> None:
        self._job_folder = job_folder
        self._last_events: dict[str, tuple[bytes, int]] = {}
        self._last_progress = self._last_poll = time.monotonic()
        self._cpu_seconds_at_progress: dict[
            int, float
        ] = {}  # processor time of each rank when it last moved
        self._cpu_seconds_at_poll: dict[int, float] = {}  # ... and at the last look
        self._longest_idle_s, self._has_stepped = 0.0, False

    def reset(self) -> None:
        """A new attempt begins."""
        self._last_events, self._last_progress = {}, time.monotonic()
        self._longest_idle_s, self._has_stepped = 0.0, False

    def poll(self) -> ProgressReport:
        """What has happened since the last look."""
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
            if self._has_stepped:  # what is sure of it: that it lasted until the last look
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
        return ProgressReport(idle_s, self._longest_idle_s, self._has_stepped, sorted(busy_ranks))

    def _records_changed(self) -> bool:
        events = {}
        for path in self._job_folder.glob("rank-*.ring"):
            try:
                last_begun, last_ended, step = read_progress(path)
            except (OSError, ValueError):
                continue
            # Where all that is read are samples of the stack, nothing of note has ended.
            last_ended = last_ended or self._last_events.get(path.name, (b"", 0))[1]
            events[path.name] = (last_begun, last_ended)
            self._has_stepped = self._has_stepped or step > 0
        changed = events != self._last_events
        self._last_events = events
        return changed

    def _cpu_seconds_by_rank(self) -> dict[int, float]:
        """Seconds of processor time of each rank, its children included."""
        return {
            rank: _process_cpu_seconds(pid)
            for rank, pid in rank_stacks.pids(self._job_folder).items()
        }


def _process_cpu_seconds(pid: int) -> float:
    """Processor time of a process and of its children (a loader's workers, a compiler)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    own_seconds = sum(int(ticks) for ticks in fields[11:15]) / _CLOCK_TICKS_PER_S
    return own_seconds + sum(_process_cpu_seconds(int(child)) for child in children)
