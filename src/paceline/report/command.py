"""What ``paceline report`` prints."""

import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console, RenderableType

from ..analyze.compare import compare, scaling
from ..analyze.load import load
from ..analyze.report import Report, analyse
from . import tables
from .terminal import panel


def told(folders: list[Path], steps: str | None, as_json: bool) -> str:
    """The report of one folder's record, of two before and after, or of several sizes.

    Raises ValueError for what can't be read, or can't be compared.
    """
    chosen = _range(steps) if steps is not None else None
    reports = [analyse(load(folder), chosen) for folder in folders]
    if len(reports) == 1:
        report = reports[0]
        if as_json:
            return report.to_json() + "\n"
        return _drawn(lambda width: panel(report, width, full=True))
    if len(reports) == 2 and reports[0].size == reports[1].size:
        before, after = reports
        changes = compare(before, after)
        if as_json:
            return _json("paceline-comparison", reports, [asdict(change) for change in changes])
        return _drawn(lambda _: tables.compared(before, after, changes))
    scales = scaling(reports)
    if as_json:
        return _json("paceline-scaling", reports, [asdict(scale) for scale in scales])
    return _drawn(lambda _: tables.scaled(scales, reports))


def _json(kind: str, reports: list[Report], rows: list[dict[str, object]]) -> str:
    whole = {"format": kind, "version": 1, "rows": rows, "reports": [asdict(r) for r in reports]}
    return json.dumps(whole, indent=1) + "\n"


def _range(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise ValueError(f"--steps {text} is not understood. HINT: as in 100:200, for 100 to 199")
    return int(first), int(last)


def _drawn(draw: Callable[[int], RenderableType]) -> str:
    """As wide as the terminal, coloured where it is one."""
    terminal = sys.stdout.isatty()
    text = io.StringIO()
    width = None if terminal or "COLUMNS" in os.environ else 100
    console = Console(file=text, force_terminal=terminal, width=width)
    console.print(draw(console.width))
    return text.getvalue()
