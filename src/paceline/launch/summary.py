"""What ``paceline run`` prints and writes at the end of a job: figures, and the guard's result."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..security.files import InvalidFileError
from ..security.outputs import write_output
from ..security.schema import parse_json
from .guard.guarded_job import guard_json
from .requeue import STOPPED_EARLY_EXIT_CODE

if TYPE_CHECKING:
    from .guard.loss_guard import LossGuard

NO_FIGURES = "the job has no figures. HINT: --record DIR, or paceline.init() in the script"
MAX_PARSED_SUMMARY_BYTES = 1 << 30


def print_summary(folder: Path, code: int, summary: Path | None, guard: "LossGuard | None") -> None:
    """Print the figures of a recorded run, unless it failed, and where its record is.

    Args:
        folder: The record.
        code: Exit code of the job.
        summary: File for the figures as JSON, or None.
        guard: The guard of the job, or None.
    """
    from ..analyze.figures.report import analyse
    from ..analyze.records.load_run import load_run
    from ..report.run_verdict import run_json
    from ..report.terminal.run_report import render

    try:
        report = analyse(load_run(folder))
    except ValueError as error:
        if summary is not None:
            _write(summary, json.dumps(_without_figures(str(error), guard_json(guard))))
        sys.stderr.write(f"paceline: {error}\n")
        return
    if summary is not None:  # first: the process that reads the output may have ended
        _write(summary, run_json(report, guard_json(guard)))
    if code in (0, STOPPED_EARLY_EXIT_CODE):
        sys.stderr.write(render(report))
    sys.stderr.write(f"paceline: the record is in {folder}. HINT: paceline report {folder}\n")


def write_summary(
    summary: Path,
    command: list[str],
    report: str | None,
    guard: "LossGuard | None",
) -> None:
    """Write the figures of a job without a record, and the result of the guard.

    Args:
        summary: The file.
        command: The script and its arguments.
        report: JSON text of rank 0, or None if it has sent none.
        guard: The guard of the job, or None.
    """
    result = guard_json(guard)
    found = {**_without_figures(NO_FIGURES, result), "command": command}
    if report is not None and result is not None:
        try:
            found = parse_json(
                report.encode(),
                dict[str, Any],
                "a summary",
                escape=False,
                max_parsed_bytes=MAX_PARSED_SUMMARY_BYTES,
            )
        except InvalidFileError as error:  # the script can write to the status pipe, too
            sys.stderr.write(f"paceline: {error}\n")
        found["guard"] = result
    if report is None or result is not None:
        report = json.dumps(found, indent=1)
    _write(summary, report)


def _without_figures(reason: str, guard: dict[str, Any] | None) -> dict[str, Any]:
    """Return the value of ``--json`` for a job without figures."""
    if guard is not None:
        return {"format": "paceline-guard", "version": 1, "guard": guard}
    return {"format": "paceline-job", "version": 1, "reason": reason}


def _write(summary: Path, text: str) -> None:
    try:
        write_output(summary, text)
    except OSError as error:
        sys.stderr.write(f"paceline: --json {summary}: {error.strerror}\n")
