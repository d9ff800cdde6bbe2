"""Progress of studies on standard error: a table on a terminal, otherwise a line for each run."""

import sys
import time

from rich.console import Group, RenderableType
from rich.text import Text

from ...analyze.scaling.study_events import Progress, StudyListener
from ...analyze.scaling.study_model import ScalingStudy, Setup, StudyRun
from ...plurals import ordinal
from ...security.text import for_terminal
from ..console import LiveDisplay
from ..numbers import amount, counted, duration, elapsed
from ..scaling.findings import Findings
from ..scaling.study_document import study_document
from ..tuning.tuning_document import counts_line, head_line, trial_sentence, tuning_document
from ..tuning.tuning_view import RUNNING, TrialRow, TuneListener, TuningView
from .draw import draw_panel

REFRESHES_PER_S = 2


class LiveTable(LiveDisplay):
    """A table on a terminal; lines where standard error is no terminal."""

    def __init__(self) -> None:
        super().__init__(REFRESHES_PER_S)

    def message(self, text: str) -> None:
        if self._live is not None and self._console is not None:
            self._console.print(Text(f"paceline: {text}"))  # above the table
        else:
            self._write(text)

    def _write(self, text: str) -> None:
        sys.stderr.write(for_terminal(f"paceline: {text}\n"))
        sys.stderr.flush()


class StudyDisplay(LiveTable, StudyListener):
    """Shows a study on standard error while it runs."""

    def __init__(self) -> None:
        self._study: ScalingStudy | None = None
        self._progress = Progress()
        # by setup: number of the repeat, start, expected duration
        self._running: dict[Setup, tuple[int, float, float]] = {}
        super().__init__()  # it asks for the table

    def study_started(self, study: ScalingStudy, progress: Progress) -> None:
        self._study, self._progress = study, progress
        if self._live is not None:
            self._live.start(refresh=True)
            return
        batch = f"; batch: {study.batch.text}" if study.batch and study.batch.text else ""
        sizes = len({point.setup for point in study.points})
        self._write(f"{counted(sizes, 'configuration')}{batch}{_left(progress)}")

    def run_started(self, setup: Setup, repeat: int, expected_s: float, progress: Progress) -> None:
        self._progress = progress
        self._running[setup] = repeat, time.monotonic(), expected_s
        if self._live is not None:
            self._live.refresh()

    def run_ended(self, run: StudyRun, study: ScalingStudy, progress: Progress) -> None:
        self._study, self._progress = study, progress
        self._running.pop(run.setup, None)
        if self._live is not None:
            self._live.refresh()
        else:
            self._write(f"run {progress.runs_done}: {run_sentence(run)}{_left(progress)}")

    def study_ended(self, study: ScalingStudy, progress: Progress) -> None:
        self._study, self._progress = study, progress
        self._running.clear()
        self.clear()

    def _draw(self) -> RenderableType:
        if self._study is None or self._console is None:
            return Text("")
        running = list(self._running)
        document = study_document(self._study, Findings(), self._console.width, running)
        return Group(draw_panel(document), Text(self.status_line(time.monotonic())))

    def status_line(self, now: float) -> str:
        """Return what runs, for how long, and what follows."""
        progress, parts = self._progress, []
        for setup, (repeat, since, expected_s) in list(self._running.items()):
            text = f"{ordinal(repeat + 1)} run of {_setup_words(setup)}: {elapsed(now - since)}"
            parts.append(text + (f" of about {elapsed(expected_s)}" if expected_s else ""))
        if progress.runs_left:
            parts.append(f"then about {counted(progress.runs_left, 'run')}")
        if progress.left_s is not None:
            parts.append(f"{elapsed(progress.left_s)} left")
        return "; ".join(parts)


def run_sentence(run: StudyRun) -> str:
    """Return a run that ended: its size, and its throughput or failure."""
    setup, figures = _setup_words(run.setup), run.figures
    if figures is None:
        first = run.failure.strip().partition("\n")[0]
        return f"{setup}: failed: {first or 'no reason is known'}"
    text = (
        f"{setup}: {amount(figures.throughput)} samples/s, {duration(figures.mean_step_s)} a step"
    )
    end = figures.to_target
    if end is None:
        return text
    best = "" if end.best is None else f", best value {end.best:.4g}"
    where = f"after {end.samples:,} samples"
    return f"{text}; {end.target} {'reached' if end.reached else 'not reached'} {where}{best}"


def _setup_words(setup: Setup) -> str:
    return f"{counted(setup.ranks, 'rank')}, global batch {setup.global_batch:,}"


def _left(progress: Progress) -> str:
    return "" if progress.left_s is None else f" ({elapsed(progress.left_s)} left)"


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
        head = f"{view.command}; {head_line(view)}"
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
        self.clear()

    def _draw(self) -> RenderableType:
        if self._view is None:
            return Text("")
        running = counted(self._view.count(RUNNING), "trial")
        status = (
            f"{running} running for up to {elapsed(max(self._view.running.values(), default=0))}"
        )
        if self._view.next_text:
            status += f"; next: {self._view.next_text}"
        return Group(draw_panel(tuning_document(self._view)), Text(status))
