"""The outputs of ``paceline diagnose``, written again after each result."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .command import STDOUT, print_json

if TYPE_CHECKING:
    from ...study.diagnose.diagnose import Diagnosis


class DiagnosisOutputs:
    """What the user asked for: text or JSON, a page, a settings file.

    Args:
        json: File of ``--json``, ``STDOUT``, or None.
        html: File of ``--html``, or None.
        settings: File of ``--save-settings``, or None.
    """

    def __init__(self, json: Path | None, html: Path | None, settings: Path | None) -> None:
        self._json, self._html, self._settings = json, html, settings
        self._trials = 0  # printed so far
        self._has_printed = False

    def update(self, found: "Diagnosis") -> None:
        """Write all files, and print what is new in a diagnosis that goes on."""
        from ...report.terminal import diagnose as shown

        self._write_files(found)
        if self._json is None:
            from ...report.console import PlainConsole

            console = PlainConsole()
            if not self._has_printed:
                console.print(shown.render(found, console.width))
                self._has_printed = True
            trials = found.tried.trials if found.tried is not None else []
            for trial in trials[self._trials :]:
                console.print(shown.render_trial(trial))
            self._trials = len(trials)

    def finish(self, found: "Diagnosis") -> None:
        """Write all files, print what was not printed yet, and say where the files are."""
        from ...report.terminal import diagnose as shown

        # first: the process that reads the output may have ended (| head)
        written = self._write_files(found)
        if self._json == STDOUT:
            print_json(shown.as_json(found), STDOUT, indent=1)
        if self._json is None:
            from ...report.console import PlainConsole

            console = PlainConsole()
            render = shown.render_trials if self._has_printed else shown.render
            console.print(render(found, console.width))
        for said in written:
            typer.echo(said, err=self._json == STDOUT)

    def _write_files(self, found: "Diagnosis") -> list[str]:
        """Write the files that were asked for. Return a message for each."""
        from ...report.terminal import diagnose as shown

        said = []
        if self._json is not None and self._json != STDOUT:
            print_json(shown.as_json(found), self._json, indent=1)
        if self._settings is not None and found.tried is not None:
            from ...study.diagnose.save_settings import save_kept_settings

            said.append(save_kept_settings(found, self._settings))
        if self._html is not None:
            from ...report.page.diagnosis_page import diagnosis
            from ...report.page.write_page import save
            from ...study.diagnose.ladder_results import WORDS

            said.append(save(diagnosis(found, WORDS), self._html))
        return said
