"""Signals to the ranks' process groups, and the end of all descendants of a process.

The kernel gives the number of a process group to a new process once the group is empty and its
leader is reaped. Signals are therefore sent only to groups whose leader is not reaped.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ...security.processes import stat_fields
from ...security.text import printable
from ..linux_processes import child_pids

# For processes to end after SIGKILL. One that frees much memory or GPUs takes seconds; one that
# waits in the kernel for a device or file system may never end.
KILL_TIMEOUT_S = 15.0


class RankGroups:
    """The process groups of the ranks that this process has forked.

    A rank that has exited is reaped only after its group was killed.
    """

    def __init__(self) -> None:
        self._running: set[int] = set()  # PIDs, which are also the numbers of the groups
        self._exited: set[int] = set()  # not reaped yet

    def add(self, pid: int) -> None:
        """Add a rank that this process has forked."""
        self._running.add(pid)

    def signal(self, pid: int, kind: int, group: bool) -> None:
        """Signal a rank, or its whole group. Do nothing if the group was killed before.

        SIGKILL to the group of a rank that has exited is the last signal to this group.
        """
        if pid not in self._running | self._exited:
            return
        _kill(pid, kind, group)
        if group and kind == signal.SIGKILL and pid in self._exited:
            self._exited.discard(pid)
            os.waitpid(pid, 0)

    def take_exits(self) -> Iterator[tuple[int, int, int]]:
        """Yield (PID, exit code or minus the signal, peak memory in bytes) of each rank that has
        exited since the last call. The peak memory is known only for ranks killed by SIGKILL.
        """
        for pid in list(self._running):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            self._running.discard(pid)
            exited = ended.si_code == os.CLD_EXITED
            code, peak = ended.si_status if exited else -ended.si_status, 0
            if code == -signal.SIGKILL:  # the job ends, and only reaping tells the peak memory
                _kill(pid, signal.SIGKILL, group=True)
                peak = os.wait4(pid, 0)[2].ru_maxrss << 10
            else:
                self._exited.add(pid)
            yield pid, code, peak

    def reap_others(self) -> None:
        """Reap children that are not ranks: orphans of the ranks."""
        for pid in _children():
            if pid not in self._running | self._exited:
                os.waitpid(pid, os.WNOHANG)


def end_children(grace: float) -> list[str]:
    """End all children of this process: SIGTERM for ``grace`` seconds, then SIGKILL.

    A subreaper becomes the parent of its orphaned descendants, so this ends all descendants.

    Returns:
        "PID (name, state S)" of each child that has not ended KILL_TIMEOUT_S after SIGKILL.
    """
    deadline = time.monotonic() + grace
    while _reap_ended() and (left := _children()):
        if time.monotonic() > deadline + KILL_TIMEOUT_S:
            return [_describe(pid) for pid in left]
        kind = signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL
        for pid in left:  # not reaped meanwhile, so that their numbers are still theirs
            _kill(pid, kind, group=True)
            _kill(pid, kind, group=False)
        until = time.monotonic() + (max(grace, 0.05) if kind == signal.SIGTERM else 0.02)
        while time.monotonic() < until and _reap_ended():
            time.sleep(0.005)
    return []


def end_remaining_children() -> None:
    """Kill all children of this process, and print which of them do not end.

    There are none, unless the rank server itself was killed or could not end a process.
    """
    for process in end_children(0.0):
        sys.stderr.write(
            f"paceline: process {process} has not ended {KILL_TIMEOUT_S:.0f} s after SIGKILL, "
            "and Paceline leaves it. HINT: in state D, it waits in the kernel for a device or "
            "file system, and ends when that answers\n"
        )


def _reap_ended() -> bool:
    """Reap ended children. Return whether any child is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _children() -> list[int]:
    """Return the PIDs of this process's children."""
    own = os.getpid()
    # none are listed by a kernel without CONFIG_PROC_CHILDREN
    return child_pids(own) or [
        int(entry)
        for entry in os.listdir("/proc")
        if entry.isdigit() and stat_fields(entry)[1:2] == [str(own)]
    ]


def _describe(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return str(pid)
    return f"{pid} ({printable(name)}, state {''.join(stat_fields(pid)[:1])})"


def _kill(pid: int, kind: int, group: bool) -> None:
    """Signal a process, or its group; do nothing if that is not possible."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if group else os.kill)(pid, kind)
