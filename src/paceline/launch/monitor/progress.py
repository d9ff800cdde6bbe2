"""Whether a job moves, as its host sees it: what its ranks have begun and ended, and before their
first step also whether they compute."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from ...record.ring.tail import read_progress
from . import rank_stacks

BUSY = 0.5  # of a core: a rank that takes that much computes
STARTING = 0.2  # of a core, before the first step: imports, compilation
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Progress:
    """still_s: for how long no rank has begun or ended anything. longest_s: the longest such
    time that came to an end, since the first step. busy: ranks that compute meanwhile."""

    still_s: float = 0.0
    longest_s: float = 0.0
    stepped: bool = False
    busy: list[int] = field(default_factory=list)


class Observer:
    """Looks at one host's ranks, again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._marks: dict[str, tuple[bytes, int]] = {}
        self._moved = self._looked = time.monotonic()
        self._then: dict[int, float] = {}  # processor time of each rank when it last moved
        self._before: dict[int, float] = {}  # ... and at the last look
        self._longest, self._stepped = 0.0, False

    def restart(self) -> None:
        """A new attempt begins."""
        self._marks, self._moved = {}, time.monotonic()
        self._longest, self._stepped = 0.0, False

    def look(self) -> Progress:
        """What has happened since the last look."""
        now, used = time.monotonic(), self._used()
        moved = self._changed()
        since = max(now - self._looked, 1e-3)
        if not self._stepped:
            took = [used[rank] - self._before.get(rank, used[rank]) for rank in used]
            moved = moved or any(each / since >= STARTING for each in took)
        if moved:
            if self._stepped:  # what is sure of it: that it lasted until the last look
                self._longest = max(self._longest, self._looked - self._moved)
            self._moved, self._then = now, used
        self._looked, self._before = now, used
        still = now - self._moved
        busy = [
            rank
            for rank, time_used in used.items()
            if still > 0 and time_used - self._then.get(rank, time_used) >= BUSY * still
        ]
        return Progress(still, self._longest, self._stepped, sorted(busy))

    def _changed(self) -> bool:
        marks = {}
        for path in self._folder.glob("rank-*.ring"):
            try:
                begun, ended, step = read_progress(path)
            except (OSError, ValueError):
                continue
            # Where all that is read are samples of the stack, nothing of note has ended.
            ended = ended or self._marks.get(path.name, (b"", 0))[1]
            marks[path.name] = (begun, ended)
            self._stepped = self._stepped or step > 0
        changed = marks != self._marks
        self._marks = marks
        return changed

    def _used(self) -> dict[int, float]:
        """Seconds of processor time of each rank, its children included."""
        return {rank: _seconds(pid) for rank, pid in rank_stacks.pids(self._folder).items()}


def _seconds(pid: int) -> float:
    """Processor time of a process and of its children (a loader's workers, a compiler)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    own = sum(int(ticks) for ticks in fields[11:15]) / _TICK
    return own + sum(_seconds(int(child)) for child in children)
