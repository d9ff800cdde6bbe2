"""The outputs of ``paceline tune``: what it prints, and the files that it writes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...security.text import printable
from .command import STDOUT, json_output
from .options import Json, can_be_written
from .study_outputs import FILES, HtmlFile

if TYPE_CHECKING:
    from ...report.tuning.tuning_view import TuningView


@dataclass(frozen=True)
class TuningOutputs:
    """What the user asked for."""

    json: Json = None
    best: Annotated[
        Path | None,
        typer.Option(
            help="Write the parameters of the best trial to this file (TOML).",
            metavar="FILE",
            show_default=False,
            rich_help_panel=FILES,
        ),
    ] = None
    csv: Annotated[
        Path | None,
        typer.Option(
            help="Write all trials to this file: one line for each.",
            metavar="FILE",
            show_default=False,
            rich_help_panel=FILES,
        ),
    ] = None
    html: HtmlFile = None
    tensorboard: Annotated[
        Path | None,
        typer.Option(
            help="Write the trials into this folder for TensorBoard's HParams. Needs the package "
            "tensorboard.",
            metavar="DIR",
            show_default=False,
            rich_help_panel=FILES,
        ),
    ] = None

    def check(self) -> None:
        """Check that the files can be written, before trials that take hours.

        Raises:
            ValueError: One can't be written, or the package tensorboard is not installed.
        """
        for name in ("best", "csv", "json", "html"):
            path = getattr(self, name)
            if path is not None and path != STDOUT:
                can_be_written(path, f"--{name}")
        if self.tensorboard is not None:
            from ...report.tuning.hparams import check_folder

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
        for path, make in self._makers():
            if path is None:
                continue
            try:
                written.append(f"paceline: {make(view, path)}")
            except ValueError as mistake:
                if is_shown:
                    raise
                written.append(f"paceline: {mistake}")
        self._print(view)
        for line in written:
            typer.echo(printable(line), err=True)

    def _makers(self) -> list[tuple[Path | None, Callable[["TuningView", Path], str]]]:
        return [
            (self.csv, _write_csv),
            (self.best, _write_best),
            (self.html, _write_page),
            (self.tensorboard, _write_hparams),
        ]

    def _print(self, view: "TuningView") -> None:
        if self.json is not None:
            from ...report.tuning.tuning_files import json_text

            with json_output(self.json):
                typer.echo(json_text(view), nl=False)
            return
        from ...report.terminal.draw import print_panel
        from ...report.tuning.tuning_document import tuning_document

        print_panel(lambda _: tuning_document(view))


def _write_csv(view: "TuningView", path: Path) -> str:
    from ...report.tuning.tuning_files import csv_text
    from ...security.outputs import write_output

    write_output(path, csv_text(view))
    return f"all trials: {path}"


def _write_best(view: "TuningView", path: Path) -> str:
    from ...report.tuning.tuning_files import best_text
    from ...security.outputs import write_output

    write_output(path, best_text(view))
    return f"best parameters: {path}"


def _write_page(view: "TuningView", path: Path) -> str:
    from ...report.page.write_page import document_page, save
    from ...report.tuning.tuning_charts import tuning_charts
    from ...report.tuning.tuning_document import tuning_document

    charts = tuning_charts(view)
    data = {"states": [], "tuning": charts}
    return save(document_page(tuning_document(view, charts), data), path)


def _write_hparams(view: "TuningView", path: Path) -> str:
    from ...report.tuning.hparams import write_hparams

    return f"{write_hparams(view, path)}: {path}"
