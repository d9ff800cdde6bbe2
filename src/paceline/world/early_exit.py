"""Early exit: what makes a run save a checkpoint and end, to be resumed later.

There are three causes: a warning signal (SIGUSR1, from a scheduler or the launcher), a time limit
so close that a checkpoint only just fits, and a search that pauses a trial (``paceline tune``).
Rank 0 decides; the other ranks learn it where they agree on checkpoints (``checkpointing``).
"""

import contextlib
import os
import signal
import threading
import time
from typing import Any

from ..cluster.schedulers import allocation
from ..record.ring.launcher_messages import send_to_launcher
from ..record.trial_reports import trial_reporter

EXIT_CODE = 75  # EX_TEMPFAIL: try again later
WARNING_SIGNAL = signal.SIGUSR1
# Time that must be left to continue: UNSAVED_MARGIN_S where no checkpoint has been written yet,
# else twice the duration of the last one and SAVE_MARGIN_S. Never more than half of the time that
# was left at the start.
UNSAVED_MARGIN_S = 120.0
SAVE_MARGIN_S = 30.0


class EarlyExit(SystemExit):
    """Raised on all ranks to end the script; the checkpoint is complete by then."""

    early = True  # an attribute, for code that must not import this module

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class EarlyExitMonitor:
    """Whether this rank sees a reason to exit early."""

    def __init__(self) -> None:
        self.warned = ""  # name of the signal
        self._paused = ""  # why a search pauses this trial
        self._handled_signals: list[signal.Signals] = []
        self._termination_reported = False
        end_time = allocation.end_time(os.environ)
        # An end time before the run began is not this job's.
        self._end_time = end_time if end_time is not None and end_time > time.time() else None
        self._max_margin_s = (
            (self._end_time - time.time()) / 2 if self._end_time is not None else 0.0
        )

    def listen(self) -> None:
        """Install handlers for warning signals that the script does not handle itself.

        Under Paceline's launcher this includes SIGTERM, which Slurm sends to all processes of a job
        that it ends. Where both signals are handled the launcher is informed: it gives such ranks
        time to leave, and ends them by other means. (Other launchers end ranks by SIGTERM, also
        ranks that wait in a collective and could not act on it.)
        """
        if (reporter := trial_reporter()) is not None:
            reporter.add_stopper(self._pause)
        if threading.current_thread() is not threading.main_thread() or not self._install_handler(
            WARNING_SIGNAL
        ):
            return
        if os.environ.get("PACELINE_STATUS") and self._install_handler(signal.SIGTERM):
            send_to_launcher(leaves=True)

    def _install_handler(self, number: signal.Signals) -> bool:
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
            return False  # the script has its own handler
        signal.signal(number, self._record_signal)
        signal.siginterrupt(number, False)  # the signal may interrupt a thread of gloo
        self._handled_signals.append(number)
        return True

    def stop(self) -> None:
        """Remove the handlers. A warning signal is ignored from now on, so it can't kill the
        script.
        """
        if (reporter := trial_reporter()) is not None:
            reporter.remove_stopper(self._pause)
        if signal.SIGTERM in self._handled_signals:
            send_to_launcher(leaves=False)
        with contextlib.suppress(ValueError):  # garbage collection may end a loop in another thread
            for number in self._handled_signals:
                if signal.getsignal(number) == self._record_signal:
                    signal.signal(
                        number, signal.SIG_IGN if number == WARNING_SIGNAL else signal.SIG_DFL
                    )
        self._handled_signals = []

    def _record_signal(self, number: int, _frame: Any) -> None:
        if self.warned != signal.SIGTERM.name:
            self.warned = signal.Signals(number).name

    def _pause(self, reason: str) -> None:
        self._paused = reason

    def report_termination(self) -> None:
        """Report a SIGTERM to the launcher.

        It then warns the other ranks, and does not requeue a job that was perhaps cancelled.
        """
        if self.warned == signal.SIGTERM.name and not self._termination_reported:
            self._termination_reported = True
            send_to_launcher(ending=True)

    def exit_reason(self, save_duration_s: float | None) -> str:
        """Return why it is time to exit, or "". save_duration_s: of the last checkpoint."""
        if self.warned:
            return f"rank 0 received {self.warned}"
        if self._paused:
            return self._paused
        if self._end_time is None:
            return ""
        left_s = self._end_time - time.time()
        if left_s > min(
            self._max_margin_s,
            UNSAVED_MARGIN_S if save_duration_s is None else 2 * save_duration_s + SAVE_MARGIN_S,
        ):
            return ""
        return f"{max(0.0, left_s):.0f} s of the job's time limit remain"
