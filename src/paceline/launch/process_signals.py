"""Signals to processes that are not children of this process."""

import os
import signal
from collections.abc import Callable


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


def signal_name(number: int) -> str:
    """Return a signal as text: "SIGKILL (signal 9)"."""
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"
