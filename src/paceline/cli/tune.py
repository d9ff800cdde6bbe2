"""The command ``paceline tune``."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from ..launch.linux_processes import signals_handled
from .common.base import UNDERSTAND, app, examples, exit_on_mistake, say
from .common.command import Command, print_json, with_options
from .common.options import HostOptions, Json, Pack, Stage, flag, output_option, value_option
from .common.stage_before_run import sets_of
from .common.study_outputs import FILES, HtmlFile

if TYPE_CHECKING:
    from ..report.tuning.tuning_view import TuningView


@dataclass(frozen=True)
class TuningOutputs:
    """What the user asked for."""

    json: Json = None
    best: Annotated[
        Path | None,
        output_option("Write the parameters of the best trial to this file (TOML).", panel=FILES),
    ] = None
    csv: Annotated[
        Path | None, output_option("Write all trials to this file: one line for each.", panel=FILES)
    ] = None
    html: HtmlFile = None
    tensorboard: Annotated[
        Path | None,
        value_option(
            "Write the trials into this folder for TensorBoard's HParams. Needs the package "
            "tensorboard.",
            "DIR",
            panel=FILES,
        ),
    ] = None

    def check(self) -> None:
        """Check --tensorboard, before trials that take hours. Options check the files.

        Raises:
            ValueError: The folder can't be written, or the package tensorboard is not installed.
        """
        if self.tensorboard is not None:
            from ..report.tuning.tuning_files import check_folder

            check_folder(self.tensorboard)

    def finish(self, view: "TuningView", is_shown: bool = True) -> None:
        """Write the files, and print the study or its JSON.

        Args:
            view: The study.
            is_shown: Whether the study was only to be shown: a file that can't be made is an error
                then. After the trials it is a note, because they are in the journal.

        Raises:
            ValueError: A file can't be written.
        """
        written = []
        makers: list[tuple[Path | None, Callable[[TuningView, Path], str]]] = [
            (self.csv, _write_csv),
            (self.best, _write_best),
            (self.html, _write_page),
            (self.tensorboard, _write_hparams),
        ]
        for path, make in makers:
            if path is None:
                continue
            try:
                written.append(make(view, path))
            except ValueError as mistake:
                if is_shown:
                    raise
                written.append(str(mistake))
        self._print(view)
        for line in written:
            say(line, lines=False)

    def _print(self, view: "TuningView") -> None:
        if self.json is not None:
            from ..report.tuning.tuning_files import tuning_json

            print_json(tuning_json(view), self.json, indent=1)
            return
        from ..report.terminal.draw import print_panel
        from ..report.tuning.tuning_document import tuning_document

        print_panel(lambda _: tuning_document(view))


def _write_csv(view: "TuningView", path: Path) -> str:
    from ..report.tuning.tuning_files import csv_text
    from ..security.outputs import write_output

    write_output(path, csv_text(view))
    return f"all trials: {path}"


def _write_best(view: "TuningView", path: Path) -> str:
    from ..report.tuning.tuning_files import best_text
    from ..security.outputs import write_output

    write_output(path, best_text(view))
    return f"best parameters: {path}"


def _write_page(view: "TuningView", path: Path) -> str:
    from ..report.page.write_page import document_page, save
    from ..report.tuning.tuning_charts import tuning_charts
    from ..report.tuning.tuning_document import tuning_document

    charts = tuning_charts(view)
    data = {"states": [], "tuning": charts}
    return save(document_page(tuning_document(view, charts), data), path)


def _write_hparams(view: "TuningView", path: Path) -> str:
    from ..report.tuning.tuning_files import write_hparams

    return f"{write_hparams(view, path)}: {path}"


@app.command(
    cls=Command,
    rich_help_panel=UNDERSTAND,
    short_help="Search for the best parameters of a script",
    epilog=examples(
        ("paceline tune study.toml", "begin a study"),
        ("paceline tune study.toml --continue", "continue it, also after kill -9"),
        ("paceline tune study.toml --show", "its trials; nothing is run"),
        ("paceline tune study.toml --best best.toml", "parameters of the best trial"),
        ("paceline tune study.toml --show --html study.html", "its page, for any browser"),
        ("salloc -N 4 paceline tune study.toml", "trials on all nodes of an allocation"),
    ),
)
@with_options
def tune(
    *,
    study: Annotated[
        Path,
        typer.Argument(
            help="Study file (TOML): command, metric, parameters, budget.", metavar="STUDY.toml"
        ),
    ],
    continued: Annotated[
        bool,
        flag(
            "--continue",
            "Continue the study: run again the trials that were interrupted, and the rest of "
            "the budget.",
        ),
    ] = False,
    fork: Annotated[
        bool,
        flag(
            "--fork",
            "Begin a new study with the changed file, in the same journal, with the complete "
            "trials that still fit.",
        ),
    ] = False,
    show: Annotated[
        bool, flag("--show", "Print the study, and write files. Nothing is run.")
    ] = False,
    minutes: Annotated[
        float | None,
        value_option(
            "Maximum duration of this call. Default: minutes of the study file.",
            "MINUTES",
            min=0.05,
        ),
    ] = None,
    files: TuningOutputs,
    stage: Stage = None,
    pack: Pack = None,
    nodes: HostOptions,
) -> None:
    """Search for the parameters with which a script reaches the best value of a metric.

    STUDY.toml names the command with placeholders, the parameters, the metric and the budget. Each
    trial is a paceline run of its own, on as many ranks as the file says. Trials run side by side
    on cores of their own, on this machine or on the nodes of the allocation.

    The study is an Optuna study in STUDY.journal, beside the file: optuna-dashboard opens it while
    it runs. The trials' output and checkpoints are in STUDY.trials. Ctrl-C ends the trials; after
    it, or after kill -9, --continue goes on.
    """
    from ..report.terminal.live_studies import TuneDisplay
    from ..study.tune.tune import TuneOptions, show_study
    from ..study.tune.tune import tune as run_tune

    with exit_on_mistake():
        files.check()
        if show or (files.best is not None and not continued and not fork and _has_study(study)):
            _check_shown(continued, fork)
            files.finish(show_study(study)[1])
            return
        if continued and fork:
            raise ValueError("--continue and --fork can't be used together. HINT: leave out one")
        sets = sets_of(stage or [], pack or [], nodes)
        options = TuneOptions(continued, fork, minutes, nodes, sets)
        with _signals() as received, TuneDisplay() as display:
            end = run_tune(study, options, display, lambda: bool(received))
        files.finish(end.view, is_shown=False)
    if not end.is_complete:
        why = "interrupted" if received else "the time is over"
        say(f"{why}. HINT: paceline tune {study} --continue", lines=False)
        if received:
            raise typer.Exit(128 + received[0])


def _has_study(study: Path) -> bool:
    return study.with_suffix(".journal").exists()


def _check_shown(continued: bool, fork: bool) -> None:
    if continued or fork:
        name = "--continue" if continued else "--fork"
        raise ValueError(f"--show runs nothing, and {name} is given too. HINT: leave out one")


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the first Ctrl-C, SIGTERM or SIGHUP; a further one raises KeyboardInterrupt."""
    received: list[int] = []

    def take(number: int, _: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt
        if number == signal.SIGINT:
            say("ending the trials; Ctrl-C again kills them")

    with signals_handled(take, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        yield received
