"""What may crash or hang inside a library made in C, in a process of its own: so that it is told in
a line."""

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

from ...launch.linux_prctl import PARENT_DEATH_SIGNAL, prctl
from .base import mistakes_told

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FROM_THE_KERNEL = 0x80  # SI_KERNEL: Ctrl-C, which every process of the terminal gets
HUNG_S = 60.0  # of a processor, while nothing is read and each thread is in the same call
LOOK_S = 0.5
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def watched(work: Callable[[], None], fault: Callable[[str], str], hangs: bool = True) -> None:
    """Do ``work`` in a child, and exit as it does. fault: what is said where a library "crashed
    (SIGSEGV)" or "has not come back ..."; it is a ValueError then. hangs: whether one that does
    not come back is looked for: not where it may be a function of the user's that takes so long.
    The child ends with this process, and gets the signals that this one gets."""
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
        raise ValueError(fault(f"has not come back for {HUNG_S:.0f} s of a processor's time"))
    if os.WIFEXITED(status):
        raise typer.Exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    if number in CRASHES:
        raise ValueError(fault(f"has crashed ({signal.Signals(number).name})"))
    if number == signal.SIGKILL:
        raise ValueError(
            "the process that did the work was killed. HINT: the kernel does so when memory is "
            "short; the same again goes on where it was"
        )
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)  # as it would have ended without a child


def _ended(child: int, moves: int, waited: set[signal.Signals], hangs: bool) -> int | None:
    """How it has: its status; None where it was ended, as it hung."""
    since, used, before = time.monotonic(), 0.0, ""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        told = signal.sigtimedwait(waited, LOOK_S)
        if told and told.si_signo in PASSED_ON and told.si_code != FROM_THE_KERNEL:
            os.kill(child, told.si_signo)
        now = _transferred(child)
        with contextlib.suppress(BlockingIOError):
            if now == before:
                os.read(moves, 1 << 16)
            since, used, before = time.monotonic(), _processor_s(child), now
        # half of it: processors are shared, and a storage that is slow burns none
        long = hangs and time.monotonic() - since > HUNG_S
        if long and _processor_s(child) - used > HUNG_S / 2:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None


def _processor_s(process: int) -> float:
    try:
        told = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(told[11]) + int(told[12])) * TICK_S


def _transferred(process: int) -> str:
    """What it has read and written so far, as the kernel tells it."""
    try:
        return " ".join(Path(f"/proc/{process}/io").read_text().split()[:4])
    except OSError:
        return ""


def _moves(line: int) -> None:
    """In the child: a byte whenever one of its threads is somewhere else than at the last look. A
    call that holds the interpreter's lock keeps this thread from looking, too."""
    own, before = threading.get_ident(), None
    while True:
        now = {k: list(_stack(f)) for k, f in sys._current_frames().items() if k != own}
        if now != before:
            os.write(line, b".")
        before = now
        time.sleep(LOOK_S)


def _stack(frame: FrameType | None) -> Iterator[tuple[int, int]]:
    """Where each of its calls is. The innermost alone says little: Python hands its lock on at few
    places of a function."""
    while frame is not None:
        yield id(frame.f_code), frame.f_lasti
        frame = frame.f_back


def _works(work: Callable[[], None], parent: int) -> NoReturn:
    """In the child, which has no other end than here."""
    code = 1
    try:
        if os.getppid() == parent:
            with mistakes_told():
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
