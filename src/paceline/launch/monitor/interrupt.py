"""Ctrl-C that cannot get lost, nor SIGTERM.

Python raises KeyboardInterrupt wherever it happens to be, and in a destructor or a callback of
the import system the exception is swallowed. So it is also remembered, and asked for later.
"""

import functools
import signal
import time
from collections.abc import Callable
from types import FrameType

TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
# For ranks to write a checkpoint and leave, once the scheduler asks the job to end: Slurm kills
# after 30 s (KillWait) unless told otherwise.
EARLY_STOP_TIMEOUT_S = 25.0


class TerminatedError(Exception):
    """A signal asks the launcher to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def raise_on_termination(take: Callable[[int], bool] = lambda number: False) -> None:
    """From now on SIGTERM and SIGHUP raise TerminatedError, the first time. take: is asked
    before; whether it sees to the end itself."""
    for number in TERMINATION_SIGNALS:
        signal.signal(number, functools.partial(_terminate, take))


def ignore_termination() -> None:
    """What is left to do takes little: no signal breaks it off."""
    for number in TERMINATION_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _terminate(take: Callable[[int], bool], number: int, _: FrameType | None) -> None:
    if take(number):
        return
    ignore_termination()
    raise TerminatedError(number)


class Interrupt:
    """Handles SIGINT from its making on, unless the process was started to ignore it."""

    def __init__(self) -> None:
        self._pressed = False
        self._ended: int | None = None
        self.stopped_early = False  # the ranks have left early, and nobody has ended the job
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._pressed = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt, or TerminatedError, where it was raised before and got lost."""
        if self._pressed:
            raise KeyboardInterrupt
        if self._ended is not None:
            raise TerminatedError(self._ended)

    def remember_termination(self, number: int) -> bool:
        """For ``raise_on_end``."""
        self._ended = number
        return False


class DeferredTermination:
    """SIGTERM of an agent's own scheduler, where the ranks can leave by themselves: it is put off,
    and the launcher, which ends them or lets them leave, is told.

    granted: whether the ranks can leave.
    """

    def __init__(self) -> None:
        self.allowed = False
        self._deadline: float | None = None
        self._reported = False

    def defer(self, number: int) -> bool:
        """Whether this signal is put off: the first SIGTERM."""
        if number != signal.SIGTERM or not self.allowed or self._deadline is not None:
            return False
        self._deadline = time.monotonic() + EARLY_STOP_TIMEOUT_S + 3
        return True

    def take_new(self) -> bool:
        """Whether one has come since the last call."""
        reported_before, self._reported = self._reported, self._deadline is not None
        return self._reported and not reported_before

    @property
    def expired(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline
