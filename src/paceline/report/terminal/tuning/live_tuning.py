"""Progress of a running study of ``paceline tune``: a table on a terminal, else a line for each
trial.
"""

import sys
from types import TracebackType
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.text import Text

from ....security.terminal import for_terminal
from ...console import PlainConsole
from ...numbers import counted, elapsed
from ...tuning.tune_events import TuneListener
from ...tuning.tuning_view import RUNNING, TrialRow, TuningView
from .tuning_table import counts_line, head_line, trial_sentence, tuning_panel

REFRESHES_PER_S = 2


class TuneDisplay(TuneListener):
    """Shows a study on standard error while it runs.

    Used as a context manager: the table is removed at the end, before the result is printed.
    """

    def __init__(self) -> None:
        self._view: TuningView | None = None
        self._live: Any = None
        self._console: PlainConsole | None = None
        if sys.stderr.isatty():
            from rich.live import Live

            self._console = PlainConsole(stderr=True, highlight=False)
            self._live = Live(
                get_renderable=self._table,
                console=self._console,
                refresh_per_second=REFRESHES_PER_S,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

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

    def message(self, text: str) -> None:
        if self._live is not None and self._console is not None:
            self._console.print(Text(f"paceline: {text}"))  # above the table
        else:
            self._write(text)

    def study_ended(self, view: TuningView) -> None:
        self._view = view
        if self._live is not None:
            self._live.stop()

    def _write(self, text: str) -> None:
        sys.stderr.write(for_terminal(f"paceline: {text}\n"))
        sys.stderr.flush()

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
