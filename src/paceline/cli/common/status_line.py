"""The progress of a long command on standard error, and signals that end it early."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ...launch.linux_processes import signals_handled
from ...report.console import LiveDisplay


class StatusLine(LiveDisplay):
    """The present activity and the time left: one line that counts down on a terminal, else one
    line for each activity.

    Args:
        deadline_s: When the command ends, on the clock of ``time.monotonic``.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s, self._text = deadline_s, ""
        super().__init__(refreshes_per_s=1)

    def say(self, text: str) -> None:
        """Show what happens now."""
        self._text = text
        if self._live is None:
            sys.stderr.write(f"{self._draw()}\n")
            sys.stderr.flush()
        else:
            self._live.start(refresh=True)  # does nothing if it is shown already

    def _draw(self) -> str:
        left = max(round(self._deadline_s - time.monotonic()), 0)
        return f"paceline: {self._text} ({left // 60}:{left % 60:02d} left)"


class Interruption:
    """The first signal that ended a command early.

    Attributes:
        signal_number: None while there was none.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def raise_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is None:
            self.signal_number = number
        raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Raise KeyboardInterrupt in the body on Ctrl-C, SIGTERM and SIGHUP."""
    found = Interruption()
    with signals_handled(found.raise_interrupt, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        yield found
