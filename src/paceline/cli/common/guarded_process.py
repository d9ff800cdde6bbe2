"""Run work that may crash or hang inside a C library in a child process.

A crash or a hang is then reported in one line.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import typer

from ...launch.linux_processes import PARENT_DEATH_SIGNAL, prctl
from ...security.processes import stat_fields
from .base import exit_on_mistake

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FROM_THE_KERNEL = 0x80  # SI_KERNEL: Ctrl-C, which the child receives from the terminal, too
HUNG_S = 60.0  # seconds without I/O while every thread stays in the same call
LOOK_S = 0.5
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def run_guarded(work: Callable[[], None], fault: Callable[[str], str], hangs: bool = True) -> None:
    """Run ``work`` in a child process and exit with the child's exit code or signal.

    The child ends when this process ends, and receives the signals that this process receives.

    Args:
        work: Function to run.
        fault: Returns the error message for a crash ("has crashed (SIGSEGV)") or a hang ("has not
            come back ...").
        hangs: Whether to detect hangs. False if ``work`` calls a function of the user, which may
            legitimately take as long.

    Raises:
        ValueError: The child crashed, hung or was killed.
    """
    waited = {signal.SIGCHLD, *PASSED_ON}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    sys.stdout.flush()
    sys.stderr.flush()
    parent, (theirs, ours) = os.getpid(), os.pipe()
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        threading.Thread(target=_moves, args=(ours,), daemon=True).start()
        _works(work, parent)
    os.close(ours)
    os.set_blocking(theirs, False)
    try:
        status = _ended(child, theirs, waited, hangs)
    finally:
        os.close(theirs)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if status is None:
        raise ValueError(fault(f"has used {HUNG_S:.0f} s of CPU time and has not returned"))
    if os.WIFEXITED(status):
        raise typer.Exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    if number in CRASHES:
        raise ValueError(fault(f"has crashed ({signal.Signals(number).name})"))
    if number == signal.SIGKILL:
        raise ValueError(
            "the working process was killed. HINT: check whether memory was exhausted; repeat "
            "the command to continue"
        )
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)  # end as without a child process


def _ended(child: int, moves: int, waited: set[signal.Signals], hangs: bool) -> int | None:
    """Return the wait status of the child, or None if it hung and was killed."""
    since, used, before = time.monotonic(), 0.0, ""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        received = signal.sigtimedwait(waited, LOOK_S)
        if received and received.si_signo in PASSED_ON and received.si_code != FROM_THE_KERNEL:
            os.kill(child, received.si_signo)
        now = _transferred(child)
        with contextlib.suppress(BlockingIOError):
            if now == before:
                os.read(moves, 1 << 16)
            since, used, before = time.monotonic(), _processor_s(child), now
        # Half of the time must be CPU time: cores are shared, and waiting for slow storage
        # uses no CPU time.
        long = hangs and time.monotonic() - since > HUNG_S
        if long and _processor_s(child) - used > HUNG_S / 2:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None


def _processor_s(process: int) -> float:
    return sum(map(int, stat_fields(process)[11:13])) * TICK_S  # 0.0 if it has ended


def _transferred(process: int) -> str:
    """Return the I/O counters of a process from /proc, as text."""
    try:
        return " ".join(Path(f"/proc/{process}/io").read_text().split()[:4])
    except OSError:
        return ""


def _moves(line: int) -> None:
    """Write a byte whenever the position of a thread has changed; runs in the child.

    A call that holds the global interpreter lock also blocks this thread, so nothing is written.
    """
    own, before = threading.get_ident(), None
    while True:
        now = {k: list(_stack(f)) for k, f in sys._current_frames().items() if k != own}
        if now != before:
            os.write(line, b".")
        before = now
        time.sleep(LOOK_S)


def _stack(frame: FrameType | None) -> Iterator[tuple[int, int]]:
    """Yield the code object and the instruction offset of each frame of a stack.

    The innermost frame is not sufficient: Python releases its lock at only a few places of a
    function, so a running thread may always be seen at the same place.
    """
    while frame is not None:
        yield id(frame.f_code), frame.f_lasti
        frame = frame.f_back


def _works(work: Callable[[], None], parent: int) -> NoReturn:
    """Run ``work`` in the child process and end the process."""
    code = 1
    try:
        if os.getppid() == parent:
            with exit_on_mistake():
                work()
            code = 0
    except typer.Exit as end:
        code = end.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
