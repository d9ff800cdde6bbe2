"""Progress of a long run on rank 0's stderr: one updating line, or a line every 10 s."""

import os
import sys
import time
from typing import Any

import torch

from ..record.pending_value import PendingValue, is_capturing
from ..record.ring.launcher_messages import notify
from ..report.numbers import amount
from .optimizer_step import OptimizerSteps


class Progress:
    """Progress of one rank; only rank 0 prints."""

    def __init__(self, rank: int, enabled: bool) -> None:
        self.is_rank_0 = rank == 0
        self.enabled = enabled and self.is_rank_0 and os.environ.get("PACELINE_PROGRESS") != "0"
        # The launcher passes on whether its own stderr is a terminal.
        self.is_terminal = sys.stderr.isatty() or os.environ.get("PACELINE_TTY") == "1"
        self.interval_s = 0.25 if self.is_terminal else 10.0
        self._next_update = time.monotonic() + self.interval_s
        self._epoch = ""
        self._line_is_open = False
        self._since = time.monotonic()
        self._samples = 0
        self._pending_loss: PendingValue | None = None
        self._printed_lines: set[str] = set()

    def epoch(self, epoch: int, count: int) -> None:
        self._epoch = f"epoch {epoch + 1}/{count}  "

    def batch(self, done: int, length: int | None, training: OptimizerSteps) -> None:
        """Count a batch, and show the progress if an update is due."""
        if not self.enabled:
            return
        self._samples += training.last_total
        now = time.monotonic()
        if now < self._next_update:
            return
        self._next_update = now + self.interval_s
        rate = self._samples / max(now - self._since, 1e-9)
        self._since, self._samples = now, 0
        total = f"/{length}" if length else ""
        loss = self._loss_text(training.last_loss)
        self._show(f"{self._epoch}batch {done}{total}  {amount(rate)} samples/s{loss}")

    def _loss_text(self, loss: torch.Tensor | float | None) -> str:
        """Return the loss for the line; of a GPU that of the last line, which has arrived."""
        if isinstance(loss, torch.Tensor) and loss.device.type == "cuda" and not is_capturing():
            before, self._pending_loss = self._pending_loss, PendingValue(loss)
            loss = before.read() if before is not None and before.is_known else None
        return f"  loss {float(loss):.4f}" if loss is not None else ""

    def _show(self, line: str) -> None:
        notify(f"\r\x1b[2K{line}\r" if self.is_terminal else line + "\n")
        self._line_is_open = self.is_terminal

    def say(self, line: str) -> None:
        """Print a permanent line."""
        if not self.is_rank_0:
            return
        notify(("\r\x1b[2K" if self._line_is_open else "") + line + "\n")
        self._line_is_open = False

    def say_once(self, line: str) -> None:
        """Print a permanent line, unless it was printed before."""
        if line not in self._printed_lines:
            self._printed_lines.add(line)
            self.say(line)

    def warn(self, message: str) -> None:
        """Print a warning."""
        self.say(f"warning: {message}")

    def warn_once(self, message: str) -> None:
        """Print a warning, unless it was printed before."""
        self.say_once(f"warning: {message}")


def format_value(value: Any) -> str:
    """Return a number or text for ``world.log``."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    return f"{value:.4g}" if isinstance(value, float) else str(value)
