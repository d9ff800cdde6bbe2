"""Leaving before the end: what makes a run save and go, to be started again later.

Two things do: a warning (SIGUSR1, from a scheduler or the launcher), and a time limit so close
that a checkpoint only just fits. Rank 0 decides; the ranks hear of it where they agree on
checkpoints (``saves``).
"""

import contextlib
import os
import signal
import threading
import time
from typing import Any

from ..cluster.schedulers import time_limit
from ..record.ring.launcher_messages import send_to_launcher

CODE = 75  # EX_TEMPFAIL: try again later
WARNING = signal.SIGUSR1
# Seconds that must be left for going on: where no checkpoint has been written yet, and beside
# twice what the last one took. Never more than half of what was left at the start.
UNSAVED = 120.0
SPARE = 30.0


class LeftEarly(SystemExit):
    """All ranks leave; their work so far is on the disk."""

    early = True  # by which it is known where this module isn't

    def __init__(self) -> None:
        super().__init__(CODE)


class Early:
    """Whether to leave, as this rank sees it."""

    def __init__(self) -> None:
        self.warned = ""  # by which signal
        self._handled: list[signal.Signals] = []
        self._told = False
        ends = time_limit.end_time(os.environ)
        # A time that was over before the run began is not this job's.
        self._ends = ends if ends is not None and ends > time.time() else None
        self._most = (self._ends - time.time()) / 2 if self._ends is not None else 0.0

    def listen(self) -> None:
        """From now on a warning is taken, unless the script takes it itself. Under our launcher
        SIGTERM too, which Slurm sends to all processes of a job that it ends; where both are
        taken the launcher is told: such ranks are given time to leave, and it ends them by
        other means. (Other launchers end ranks by SIGTERM, also those that wait in an exchange
        and could not act on it.)"""
        if threading.current_thread() is not threading.main_thread() or not self._take(WARNING):
            return
        if os.environ.get("PACELINE_STATUS") and self._take(signal.SIGTERM):
            send_to_launcher(leaves=True)

    def _take(self, kind: signal.Signals) -> bool:
        if signal.getsignal(kind) not in (signal.SIG_DFL, signal.SIG_IGN):
            return False  # the script's own
        signal.signal(kind, self._note)
        signal.siginterrupt(kind, False)  # it may reach a thread of gloo's
        self._handled.append(kind)
        return True

    def stop(self) -> None:
        """The script is on its own again; a warning no longer kills it, though."""
        if signal.SIGTERM in self._handled:
            send_to_launcher(leaves=False)
        with contextlib.suppress(ValueError):  # the collector may end a loop in another thread
            for kind in self._handled:
                if signal.getsignal(kind) == self._note:
                    signal.signal(kind, signal.SIG_IGN if kind == WARNING else signal.SIG_DFL)
        self._handled = []

    def _note(self, number: int, _frame: Any) -> None:
        if self.warned != signal.SIGTERM.name:
            self.warned = signal.Signals(number).name

    def tell(self) -> None:
        """Tell the launcher of a SIGTERM: it has others warned, and queues no job again that was
        perhaps cancelled."""
        if self.warned == signal.SIGTERM.name and not self._told:
            self._told = True
            send_to_launcher(ending=True)

    def why(self, took: float | None) -> str:
        """Why it is time to leave, or "". took: seconds that the last checkpoint took."""
        if self.warned:
            return f"a warning came ({self.warned})"
        if self._ends is None:
            return ""
        left = self._ends - time.time()
        if left > min(self._most, UNSAVED if took is None else 2 * took + SPARE):
            return ""
        return f"{max(0.0, left):.0f} s are left of the job's time"
