"""Collection of the Python stacks of all ranks from outside the ranks.

A rank answers a reserved signal with the stacks of all its threads. faulthandler writes them from
the C signal handler, so that a rank that waits in C++ code answers too. A process that is stopped
or blocked in the kernel can't answer. Its stacks are read from its memory (``process_stack``).
"""

import contextlib
import faulthandler
import os
import re
import signal
import time
from functools import partial
from pathlib import Path

from ...record.ring.tail import process_state
from ...security.files import open_regular, read_regular
from ..process_signals import signal_checked
from . import process_stack

# A signal that neither schedulers nor scripts normally use.
SIGNAL = int(getattr(signal, "SIGRTMIN", signal.SIGUSR1)) + 7
SECONDS = 1.0  # timeout for the answers of all ranks together
MAX_STACK_BYTES = 256 << 20  # of a rank's file, which contains all stacks it has written
_QUIET = 0.05  # seconds without new output after which a stack is complete


def answer() -> None:
    """Let this rank answer the signal, and allow other processes to read its memory.

    Called in a rank before its script runs.
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
        path.unlink(missing_ok=True)  # an existing file means that the rank answers


def pids(folder: Path) -> dict[int, int]:
    """Return the PID of each rank that answers, by global rank."""
    found = {}
    for path in folder.glob("rank-*.stack"):
        match = re.fullmatch(r"rank-(\d{1,9})-(\d{1,9})", path.stem)
        if match and process_state(int(match[2])):
            found[int(match[1])] = int(match[2])
    return found


def ask(folder: Path) -> dict[int, str]:
    """Return the stacks, by global rank, of the ranks on this host that answer in time or can be
    read.
    """
    all_pids = {
        rank: pid
        for rank, pid in pids(folder).items()
        if _has_open(pid, folder / f"rank-{rank}-{pid}.stack")
    }
    answers = _answers(folder, all_pids)
    return answers | process_stack.read({r: pid for r, pid in all_pids.items() if r not in answers})


def _has_open(pid: int, path: Path) -> bool:
    """Return whether a process has its rank's file open.

    The PID may have been reused, and the signal would end the other process.
    """
    descriptors = Path(f"/proc/{pid}/fd")
    try:
        wanted = path.stat(follow_symlinks=False)
        names = os.listdir(descriptors)
    except OSError:  # the process has ended, or belongs to another user
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
        if process_state(pid) in ("T", "t"):  # it would answer only after it is continued
            continue
        size = path.stat().st_size
        with contextlib.suppress(OSError):
            if signal_checked(pid, [SIGNAL], partial(_has_open, pid, path)):
                before[rank] = (path, size)
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
