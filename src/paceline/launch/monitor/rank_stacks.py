"""Collection of the Python stacks of all ranks from outside the ranks.

A rank answers a reserved signal with the stacks of all its threads. faulthandler writes them from
the C signal handler, so that a rank that waits in C++ code answers too. A process that is stopped
or blocked in the kernel can't answer. Its stacks are read from its memory by py-spy.
"""

import contextlib
import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ...record.ring.tail import process_state
from ...security.files import open_regular, read_regular
from ...security.processes import find_program, stat_fields
from ...security.schema import load_json
from ..linux_processes import prctl, signal_checked

# A signal that neither schedulers nor scripts normally use.
SIGNAL = int(getattr(signal, "SIGRTMIN", signal.SIGUSR1)) + 7
ANSWER_TIMEOUT_S = 1.0  # timeout for the answers of all ranks together
MAX_STACK_BYTES = 256 << 20  # of a rank's file, which contains all stacks it has written
_QUIET_S = 0.05  # seconds without new output after which a stack is complete


# Reading of Python stacks from the memory of ranks that can't answer a signal.
#
# py-spy reads the memory of another process without its cooperation and without stopping it. A
# kernel with Yama allows this only for a process that the target has named, and for its
# descendants. A rank names its launcher.

PY_SPY_TIMEOUT_S = 1.8  # timeout for all ranks together; one rank takes some hundredths of a second
MAX_CONCURRENT = 8  # concurrent py-spy processes
MAX_PY_SPY_BYTES = 4 << 20  # maximum output of py-spy that is read
MAX_THREADS, MAX_FRAMES = 100, 100  # same limits as faulthandler
_PTRACER = 0x59616D61  # PR_SET_PTRACER of prctl(2)
_POLL_INTERVAL_S = 0.005  # seconds between two polls
_END_TIMEOUT_S = 0.1  # timeout for the end of a killed py-spy


def allow_reading() -> None:
    """Allow the process that started the rank server, and its descendants, to read this process.

    Called in a rank. A kernel without Yama does not have this call, and lets all processes of the
    same user read.
    """
    if os.environ.get("PACELINE_STATUS", "").partition(":")[0] != str(os.getpid()):
        return  # not started by a rank server
    if fields := stat_fields(os.getppid()):
        prctl(_PTRACER, int(fields[1]))


def read_memory(pids: Mapping[int, int]) -> dict[int, str]:
    """Return the stacks of ranks in the format of faulthandler.

    Args:
        pids: PID of each rank, by global rank.

    Returns:
        The stacks of the ranks that can be read in time, by global rank. STACK_NOT_PERMITTED for a
        process that the kernel does not allow to read.
    """
    tool = shutil.which("py-spy", path=os.path.dirname(sys.executable)) or find_program("py-spy")
    if tool is None or not pids:
        return {}
    deadline = time.monotonic() + PY_SPY_TIMEOUT_S
    waiting, running, found = list(pids.items()), list[_Reading](), {}
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < MAX_CONCURRENT:
                running.append(_Reading(tool, *waiting.pop()))
            time.sleep(_POLL_INTERVAL_S)
            for reading in [reading for reading in running if reading.process.poll() is not None]:
                found[reading.rank] = reading.text()
                running.remove(reading)
                reading.close()
    except OSError:  # not enough memory or file descriptors
        pass
    finally:
        for reading in running:
            reading.process.kill()
        for reading in running:
            reading.close()
    return {rank: text for rank, text in found.items() if text}


class _Reading:
    """A running py-spy process. It writes to a memory file, so it never blocks on a full pipe."""

    def __init__(self, tool: str, rank: int, pid: int) -> None:
        self.rank, self._pid = rank, pid
        self._output = os.memfd_create("py-spy")
        self._errors = os.memfd_create("py-spy")
        try:
            self.process = subprocess.Popen(
                [tool, "dump", "--nonblocking", "--json", "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._errors,
            )
        except BaseException:
            self._close_files()
            raise

    def text(self) -> str:
        """Return the stacks after py-spy has ended; "" if it could not read them."""
        from ...analyze.records.stacks import STACK_NOT_PERMITTED

        if self.process.returncode == 0:
            try:
                return as_faulthandler(
                    load_json(os.pread(self._output, MAX_PY_SPY_BYTES, 0), "py-spy"), self._pid
                )
            except (ValueError, KeyError, TypeError):
                return ""
        return (
            STACK_NOT_PERMITTED
            if b"Permission" in os.pread(self._errors, MAX_PY_SPY_BYTES, 0)
            else ""
        )

    def close(self) -> None:
        """Wait for py-spy, which has ended or was killed, and close its output files."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_TIMEOUT_S)
        self._close_files()

    def _close_files(self) -> None:
        os.close(self._output)
        os.close(self._errors)


def as_faulthandler(threads: Iterable[dict[str, Any]], pid: int) -> str:
    """Return py-spy's output in the format of faulthandler, with the main thread last."""

    def is_main(thread: dict[str, Any]) -> bool:
        return bool(thread["os_thread_id"] == pid or thread["thread_name"] == "MainThread")

    blocks = []
    for thread in sorted(threads, key=is_main)[-MAX_THREADS:]:
        lines = [f"Thread 0x{thread['thread_id']:016x} (most recent call first):"]
        lines += [
            f'  File "{frame["filename"]}", line {frame["line"]} in {frame["name"]}'
            for frame in thread["frames"][:MAX_FRAMES]
        ]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def answer() -> None:
    """Let this rank answer the signal, and allow other processes to read its memory.

    Called in a rank before its script runs.
    """
    folder, rank = os.environ.get("PACELINE_RECORD"), os.environ.get("RANK", "0")
    if folder is None:
        return
    allow_reading()
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
    return answers | read_memory({r: pid for r, pid in all_pids.items() if r not in answers})


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
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    sizes: dict[int, int] = {}
    while time.monotonic() < deadline:
        time.sleep(_QUIET_S)
        now = {rank: path.stat().st_size for rank, (path, _) in before.items()}
        if now == sizes and all(now[rank] > size for rank, (_, size) in before.items()):
            break
        sizes = now
    texts = {
        rank: read_regular(path, MAX_STACK_BYTES, follow_links=False)[size:]
        for rank, (path, size) in before.items()
    }
    return {rank: text.decode(errors="replace") for rank, text in texts.items() if text}
