"""What a long run says while it runs: on rank 0, on stderr, one line that moves or one now
and then."""

import os
import sys
import time

from ..record.ring.launcher_messages import notify
from .optimizer_step import Training


class Progress:
    """Progress of one rank; only rank 0 speaks."""

    def __init__(self, rank: int, enabled: bool) -> None:
        self.speaks = rank == 0
        self.enabled = enabled and self.speaks and os.environ.get("PACELINE_PROGRESS") != "0"
        # The launcher passes on whether its own stderr is a terminal.
        self.moving = sys.stderr.isatty() or os.environ.get("PACELINE_TTY") == "1"
        self.interval = 0.25 if self.moving else 10.0
        self._next = time.monotonic() + self.interval
        self._epoch = ""
        self._open = False
        self._since = time.monotonic()
        self._samples = 0

    def epoch(self, epoch: int, count: int) -> None:
        self._epoch = f"epoch {epoch + 1}/{count}  "

    def batch(self, done: int, length: int | None, training: Training) -> None:
        """One more batch; ``training`` knows its samples and the loss."""
        if not self.enabled:
            return
        self._samples += training.last_total
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self.interval
        rate = self._samples / max(now - self._since, 1e-9)
        self._since, self._samples = now, 0
        of = f"/{length}" if length else ""
        loss = f"  loss {float(training.last_loss):.4f}" if training.last_loss is not None else ""
        self._show(f"{self._epoch}batch {done}{of}  {rate:,.0f} samples/s{loss}")

    def _show(self, line: str) -> None:
        notify(f"\r\x1b[2K{line}\r" if self.moving else line + "\n")
        self._open = self.moving

    def say(self, line: str) -> None:
        """A line that stays."""
        if not self.speaks:
            return
        notify(("\r\x1b[2K" if self._open else "") + line + "\n")
        self._open = False
