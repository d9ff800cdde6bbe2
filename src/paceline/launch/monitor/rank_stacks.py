"""Collect the Python stacks of all ranks from outside.

A rank answers a reserved signal with the stacks of all its threads: faulthandler writes them from
the C signal handler, so a rank that waits in C++ code answers too. A stopped process, or one that
is blocked in the kernel, can't answer: it is read from outside.
"""

import contextlib
import faulthandler
import os
import re
import signal
import time
from pathlib import Path

from ...record.ring.tail import process_state
from ...security.files import open_regular, read_regular
from . import process_stack

# None that a scheduler or a script uses.
SIGNAL = int(getattr(signal, "SIGRTMIN", signal.SIGUSR1)) + 7
SECONDS = 1.0  # for all answers together
MAX_STACK_BYTES = 256 << 20  # all stacks that a rank has ever written
_QUIET = 0.05  # nothing new for so long: a stack is whole


def answer() -> None:
    """In a rank, before its script runs: answer the signal from now on, and allow reads from
    outside.
    """
    folder, rank = os.environ.get("PACELINE_RECORD"), os.environ.get("RANK", "0")
    if folder is None:
        return
    process_stack.allow()
    path = Path(folder) / f"rank-{rank}-{os.getpid()}.stack"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        fd = open_regular(path, flags, follow_links=False, owner=os.geteuid())
        faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=False)
    except (OSError, ValueError, RuntimeError):
        path.unlink(missing_ok=True)  # it is the file that says that it answers


def pids(folder: Path) -> dict[int, int]:
    """Return the process of each rank that answers."""
    found = {}
    for path in folder.glob("rank-*.stack"):
        match = re.fullmatch(r"rank-(\d{1,9})-(\d{1,9})", path.stem)
        if match and process_state(int(match[2])):
            found[int(match[1])] = int(match[2])
    return found


def ask(folder: Path) -> dict[int, str]:
    """Return the stacks of the ranks on this host that answer in time or can be read."""
    all_pids = {
        rank: pid
        for rank, pid in pids(folder).items()
        if _has_open(pid, folder / f"rank-{rank}-{pid}.stack")
    }
    answers = _answers(folder, all_pids)
    return answers | process_stack.read({r: pid for r, pid in all_pids.items() if r not in answers})


def _has_open(pid: int, path: Path) -> bool:
    """Whether a process has its rank's file open: a PID may be reused later, and the signal would
    end another process.
    """
    descriptors = Path(f"/proc/{pid}/fd")
    try:
        wanted = path.stat(follow_symlinks=False)
        names = os.listdir(descriptors)
    except OSError:  # it has ended, or is another user's
        return False
    for name in names:
        with contextlib.suppress(OSError):
            link = descriptors / name
            if os.readlink(link).endswith(path.name) and os.path.samestat(link.stat(), wanted):
                return True
    return False


def _answers(folder: Path, all_pids: dict[int, int]) -> dict[int, str]:
    before: dict[int, tuple[Path, int]] = {}
    for rank, pid in all_pids.items():
        path = folder / f"rank-{rank}-{pid}.stack"
        if process_state(pid) in ("T", "t"):  # it would answer when it goes on
            continue
        before[rank] = (path, path.stat().st_size)
        try:
            os.kill(pid, SIGNAL)
        except OSError:
            del before[rank]
    deadline = time.monotonic() + SECONDS
    sizes: dict[int, int] = {}
    while time.monotonic() < deadline:
        time.sleep(_QUIET)
        now = {rank: path.stat().st_size for rank, (path, _) in before.items()}
        if now == sizes and all(now[rank] > size for rank, (_, size) in before.items()):
            break
        sizes = now
    texts = {
        rank: read_regular(path, MAX_STACK_BYTES, follow_links=False)[size:]
        for rank, (path, size) in before.items()
    }
    return {rank: text.decode(errors="replace") for rank, text in texts.items() if text}
