"""Processes on Linux: attributes by prctl(2), signals, and what /proc says of them."""

import contextlib
import ctypes
import os
import select
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from ..security.processes import stat_fields

SET_NAME = 15  # PR_SET_NAME: the name of the main thread, at most 15 bytes
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG: the signal that this process gets when its parent ends
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphaned descendants become children of this process


def prctl(option: int, value: int) -> None:
    """Call prctl(2). Do nothing on systems without it."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def set_title(title: str) -> None:
    """Show ``title`` as the command line of this process, in ps and top.

    It replaces the arguments in the memory of the process, and is cut to their length. Nothing is
    done on systems other than Linux.
    """
    text = os.fsencode(title).replace(b"\0", b" ")
    try:
        fields = stat_fields("self")
        start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end of proc(5)
        shown = Path("/proc/self/cmdline").read_bytes()
        # the arguments may not be here: another process of a test or a tool has moved them
        if not start or ctypes.string_at(start, end - start) != shown:
            return
    except (OSError, ValueError, IndexError):
        return
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, min(len(text), end - start - 1))
    name = ctypes.create_string_buffer(text[:15])
    prctl(SET_NAME, ctypes.addressof(name))


def signal_checked(pid: int, kinds: list[int], is_meant: Callable[[], bool]) -> bool:
    """Signal a process if ``is_meant`` returns true. Return whether the signals were sent.

    ``is_meant`` checks that the PID is still that of the intended process. The process is opened
    before the check, so that the signals reach no other process that gets the PID afterwards.

    Raises:
        OSError: The process belongs to another user.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):  # a kernel before Linux 5.3, or a sandbox that forbids it
        fd = None
    try:
        if not is_meant():
            return False
        for kind in kinds:
            if fd is None:
                os.kill(pid, kind)
            else:
                signal.pidfd_send_signal(fd, kind)
        return True
    except ProcessLookupError:
        return False
    finally:
        if fd is not None:
            os.close(fd)


def is_ready(descriptor: int, event: int, seconds: float) -> bool:
    """Wait until a descriptor is readable (select.POLLIN) or writable (select.POLLOUT)."""
    poll = select.poll()  # select takes no descriptors above 1023
    poll.register(descriptor, event)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def signal_name(number: int) -> str:
    """Return a signal as text: "SIGKILL (signal 9)"."""
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def signals_handled(
    handler: Callable[[int, Any], Any] | signal.Handlers,
    kinds: Iterable[int] = (signal.SIGTERM, signal.SIGHUP),
) -> Iterator[None]:
    """Handle signals in the body by ``handler``."""
    before = {kind: signal.signal(kind, handler) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler_before in before.items():
            signal.signal(kind, handler_before)


def exit_on_signal(number: int, _: Any) -> NoReturn:
    """Exit through SystemExit, so that temporary files are removed and the terminal is restored."""
    raise SystemExit(128 + number)


def child_pids(pid: int) -> list[int]:
    """Return the PIDs of a process's children: the kernel lists each under a thread of it."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, path.read_text().split())
    return found
