"""The outputs of ``paceline scale``: what it prints, and the files that it writes."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...security.files import error_reason
from ...security.outputs import write_output
from .command import STDOUT, print_json
from .options import Json, output_option, value_option

if TYPE_CHECKING:
    from ...analyze.scaling.outcomes.compare_studies import StudyComparison
    from ...analyze.scaling.study_model import ScalingStudy
    from ...report.scaling.findings import Findings

FILES = "Files"

HtmlFile = Annotated[
    Path | None,
    output_option("Write a self-contained HTML page to this file.", "--html", panel=FILES),
]


@dataclass(frozen=True)
class StudyOutputs:
    """What the user asked for."""

    json: Json = None
    html: HtmlFile = None
    csv: Annotated[
        Path | None, output_option("Write all figures of each size to this file.", panel=FILES)
    ] = None
    svg: Annotated[
        Path | None,
        output_option(
            "Write a drawing of speed-up and efficiency to this file, for a document.", panel=FILES
        ),
    ] = None
    latex: Annotated[
        Path | None,
        output_option(
            "Write a LaTeX table of the sizes to this file. It needs no LaTeX package.", panel=FILES
        ),
    ] = None
    extrap: Annotated[
        Path | None,
        output_option(
            "Write the times of all runs to this file as input of Extra-P: JSON, or JSON "
            "Lines if the name ends in .jsonl.",
            panel=FILES,
        ),
    ] = None
    talp: Annotated[
        Path | None,
        value_option(
            "Write the POP efficiencies of all runs into this folder in the format of DLB's "
            "TALP, for TALP-Pages.",
            "DIR",
            panel=FILES,
        ),
    ] = None

    def check(self) -> None:
        """Raise ValueError if the folder of --talp can't be written, before runs that take
        minutes. Options check the files.
        """
        if self.talp is not None and self.talp.exists() and not self.talp.is_dir():
            raise ValueError(f"--talp {self.talp} is no folder. HINT: name a new folder")

    def finish(self, study: "ScalingStudy", findings: "Findings") -> None:
        """Write all files, print the tables or JSON, and say where the files are.

        Raises:
            ValueError: A file can't be written, or the study has no measured size to write.
        """
        written = self._write_files(study, findings)
        if self.json is not None:
            from ...report.scaling.study_files import study_json

            print_json(study_json(study, findings), self.json, indent=1)
        else:
            from ...report.scaling.study_document import study_document
            from ...report.terminal.draw import print_panel

            print_panel(lambda width: study_document(study, findings, width))
        for message in written:
            typer.echo(message, err=self.json == STDOUT)

    def _write_files(self, study: "ScalingStudy", findings: "Findings") -> list[str]:
        """Write the files that were asked for. Return a message for each."""
        from ...report.scaling.study_charts import svg_text
        from ...report.scaling.study_files import csv_text, extrap_text, latex_text, talp_files

        written = []
        if self.html is not None:
            from ...report.page.write_page import document_page, save
            from ...report.scaling.study_charts import study_charts
            from ...report.scaling.study_document import WIDE, study_document

            data = study_charts(study, findings)
            page = document_page(study_document(study, findings, WIDE), data)
            written.append(save(page, self.html))
        texts: list[tuple[Path | None, str, Callable[[Path], str]]] = [
            (self.csv, "figures of all sizes", lambda _: csv_text(study)),
            (self.svg, "speed-up and efficiency", lambda _: svg_text(study, findings)),
            (self.latex, "table for a document", lambda _: latex_text(study)),
            (self.extrap, "input of Extra-P", lambda path: extrap_text(study, path)),
        ]
        for path, what, text in texts:
            if path is not None:
                _write(path, text(path))
                written.append(f"{path}: {what}")
        if self.talp is not None:
            files = talp_files(study)
            for name, text_of_run in files.items():
                path = self.talp / name
                path.parent.mkdir(parents=True, exist_ok=True)
                _write(path, text_of_run)
            written.append(f"{self.talp}: {len(files)} files for TALP-Pages")
        return written


OUTPUTS = tuple(given.name for given in fields(StudyOutputs))  # parameters of the command


def print_comparison(found: "StudyComparison", json: Path | None, html: Path | None = None) -> None:
    """Print the comparison of two studies, or write it as JSON, and write its page."""
    from ...report.numbers import finite
    from ...report.scaling import study_comparison as report

    document = report.comparison_document(found)
    if html is not None:
        from ...report.page.write_page import document_page, save

        data = report.comparison_charts(found)
        typer.echo(save(document_page(document, data), html), err=json == STDOUT)
    if json is not None:
        print_json(finite(report.comparison_json(found)), json, indent=1)
        return
    from ...report.terminal.draw import print_panel

    print_panel(lambda _: document)


def _write(path: Path, text: str) -> None:
    try:
        write_output(path, text)
    except OSError as error:
        raise ValueError(
            f"{path} can't be written: {error_reason(error)}. HINT: name a file in a folder that "
            "you can write to"
        ) from None
