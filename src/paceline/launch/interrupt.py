"""Ctrl-C that cannot get lost.

Python raises KeyboardInterrupt wherever it happens to be, and in a destructor or a callback of
the import system the exception is swallowed. So it is also remembered, and asked for later.
"""

import signal
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)


class TerminatedError(Exception):
    """A signal asks the launcher to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def raise_on_end() -> None:
    """From now on SIGTERM and SIGHUP raise TerminatedError, the first time."""
    for number in ENDING:
        signal.signal(number, _terminate)


def no_longer_end() -> None:
    """What is left to do takes little: no signal breaks it off."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def _terminate(number: int, _: FrameType | None) -> None:
    no_longer_end()
    raise TerminatedError(number)


class Interrupt:
    """Handles SIGINT from its making on, unless the process was started to ignore it."""

    def __init__(self) -> None:
        self._pressed = False
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._pressed = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt where it was raised before and got lost."""
        if self._pressed:
            raise KeyboardInterrupt
