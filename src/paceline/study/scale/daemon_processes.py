"""Processor time of ranks that a daemon of the scheduler has started on this node.

They are no descendants of ``paceline scale``, so the kernel does not add up their time for it. They
are found by an environment variable that ``srun`` and the like pass on.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "PACELINE_STUDY_PROCESS"  # the same value in all processes that a study starts
PROC = Path("/proc")
MAX_ENVIRONMENT_BYTES = 1 << 20


@contextlib.contextmanager
def marked_processes() -> Iterator[None]:
    """Mark the processes that are started meanwhile."""
    os.environ[VARIABLE] = secrets.token_hex(8)
    try:
        yield
    finally:
        del os.environ[VARIABLE]


@dataclass(frozen=True)
class _Process:
    """A process. ``ticks``: its processor time and that of its children that it has waited for."""

    parent: int
    started: int
    ticks: int


class DaemonProcesses:
    """The marked processes that are no descendants of this one, and their processor time.

    Attributes:
        found: Whether there was one.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc, self._mark = proc, os.environ.get(VARIABLE, "")
        self._marked: dict[tuple[int, int], bool] = {}
        self._members: dict[int, _Process] = {}
        self._ended = 0
        self.found = False

    def sample(self) -> None:
        """Look at all processes of this user.

        The time of a process that has ended since the last look is that of the last look, unless
        its parent has waited for it.
        """
        if not self._mark:
            return
        every = self._processes()
        members = {pid: every[pid] for pid in every if self._is_member(pid, every)}
        for pid, before in self._members.items():
            now = members.get(pid)
            is_same = now is not None and now.started == before.started
            if not is_same and before.parent not in members:
                self._ended += before.ticks
        self._members = members
        self.found = self.found or bool(members)

    @property
    def seconds(self) -> float:
        """Processor time until the last look."""
        ticks = self._ended + sum(process.ticks for process in self._members.values())
        return float(ticks / os.sysconf("SC_CLK_TCK"))

    def _processes(self) -> dict[int, _Process]:
        found = {}
        with os.scandir(self._proc) as entries:
            for entry in entries:
                with contextlib.suppress(OSError, ValueError, IndexError):
                    if entry.name.isdecimal() and entry.stat().st_uid == os.getuid():
                        found[int(entry.name)] = self._read(int(entry.name))
        return found

    def _read(self, pid: int) -> _Process:
        text = (self._proc / str(pid) / "stat").read_text(errors="replace")
        words = text.rpartition(")")[2].split()
        return _Process(int(words[1]), int(words[19]), sum(map(int, words[11:15])))

    def _is_member(self, pid: int, every: dict[int, _Process]) -> bool:
        """Return whether a process or one of its ancestors is marked, and none is this process."""
        is_marked = False
        while pid in every and pid != os.getpid():
            is_marked = is_marked or self._is_marked(pid, every[pid].started)
            pid = every[pid].parent
        return is_marked and pid != os.getpid()

    def _is_marked(self, pid: int, started: int) -> bool:
        if (pid, started) not in self._marked:
            self._marked[pid, started] = self._has_mark(pid)
        return self._marked[pid, started]

    def _has_mark(self, pid: int) -> bool:
        try:
            with open(self._proc / str(pid) / "environ", "rb") as file:
                words = file.read(MAX_ENVIRONMENT_BYTES).split(b"\0")
        except OSError:
            return False
        return f"{VARIABLE}={self._mark}".encode() in words
