"""Progress of a running study of ``paceline tune``: a table on a terminal, else a line for each
trial.
"""

from rich.console import Group, RenderableType
from rich.text import Text

from ...numbers import counted, elapsed
from ...tuning.tune_events import TuneListener
from ...tuning.tuning_view import RUNNING, TrialRow, TuningView
from ..live_table import LiveTable
from .tuning_table import counts_line, head_line, trial_sentence, tuning_panel


class TuneDisplay(LiveTable, TuneListener):
    """Shows a study on standard error while it runs."""

    def __init__(self) -> None:
        self._view: TuningView | None = None
        super().__init__()  # it asks for the table

    def study_started(self, view: TuningView) -> None:
        self._view = view
        if self._live is not None:
            self._live.start(refresh=True)
            return
        head = head_line(view).replace("\n", "; ")
        done = f"; {counts_line(view)}" if view.rows else ""
        self._write(f"study {view.name}: {head}{done}")

    def trial_started(self, row: TrialRow, view: TuningView) -> None:
        self._view = view

    def trial_ended(self, row: TrialRow, view: TuningView) -> None:
        self._view = view
        if self._live is None:
            left = "" if view.left_s is None else f" (about {elapsed(view.left_s)} left)"
            self._write(trial_sentence(row, view) + left)

    def progress(self, view: TuningView) -> None:
        self._view = view

    def study_ended(self, view: TuningView) -> None:
        self._view = view
        if self._live is not None:
            self._live.stop()

    def _table(self) -> RenderableType:
        if self._view is None:
            return Text("")
        running = counted(self._view.count(RUNNING), "trial")
        status = (
            f"{running} running for up to {elapsed(max(self._view.running.values(), default=0))}"
        )
        if self._view.next_text:
            status += f"; next: {self._view.next_text}"
        return Group(tuning_panel(self._view), Text(status))
