"""Handle SIGINT and SIGTERM so that they can't get lost.

Python raises KeyboardInterrupt at any point of the program; in a destructor or a callback of the
import system the exception is swallowed. So the signal is also remembered and checked later.
"""

import functools
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
# For ranks to write a checkpoint and stop, after the scheduler asks the job to end: Slurm kills
# after 30 s (KillWait) by default.
EARLY_STOP_TIMEOUT_S = 25.0


class TerminatedError(Exception):
    """A signal asks the launcher to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def report_before_start(self) -> int:
        """Print that the job ends before its ranks have started; return its exit code."""
        name = signal.Signals(self.number).name
        sys.stderr.write(f"paceline: {name} before the ranks started\n")
        return 128 + self.number


def raise_on_termination(take: Callable[[int], bool] = lambda number: False) -> None:
    """Make SIGTERM and SIGHUP raise TerminatedError, the first time.

    Args:
        take: Called first with the signal's number; returns whether it handles the signal itself.
    """
    for number in TERMINATION_SIGNALS:
        signal.signal(number, functools.partial(_terminate, take))


def ignore_termination() -> None:
    """Ignore SIGTERM and SIGHUP: the remaining work is short and must not be interrupted."""
    for number in TERMINATION_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _terminate(take: Callable[[int], bool], number: int, _: FrameType | None) -> None:
    if take(number):
        return
    ignore_termination()
    raise TerminatedError(number)


class Interrupt:
    """Handle SIGINT, unless the process was started to ignore it."""

    def __init__(self) -> None:
        self._pressed = False
        self._ended: int | None = None
        self.stopped_early = False  # the ranks stopped early, and no signal ended the job
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._pressed = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt or TerminatedError if an earlier one got lost."""
        if self._pressed:
            raise KeyboardInterrupt
        if self._ended is not None:
            raise TerminatedError(self._ended)

    def remember_termination(self, number: int) -> bool:
        """Remember a signal; argument of ``raise_on_termination``."""
        self._ended = number
        return False


class DeferredTermination:
    """Defer the SIGTERM of an agent's scheduler while the ranks can stop early with a checkpoint.
    The launcher is informed, and ends the ranks or lets them stop.

    Attributes:
        allowed: Whether the ranks can stop early.
    """

    def __init__(self) -> None:
        self.allowed = False
        self._deadline: float | None = None
        self._reported = False

    def defer(self, number: int) -> bool:
        """Return whether this signal is deferred: only the first SIGTERM."""
        if number != signal.SIGTERM or not self.allowed or self._deadline is not None:
            return False
        self._deadline = time.monotonic() + EARLY_STOP_TIMEOUT_S + 3
        return True

    def take_new(self) -> bool:
        """Return whether a signal was deferred since the last call."""
        reported_before, self._reported = self._reported, self._deadline is not None
        return self._reported and not reported_before

    @property
    def expired(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline
