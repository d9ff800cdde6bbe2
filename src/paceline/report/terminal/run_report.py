"""Report of one run in the terminal; colours obey NO_COLOR."""

import io
import os
import sys

from rich.panel import Panel

from ...analyze.figures.report import Report
from ...record.ring.launcher_messages import notify
from ..console import PlainConsole
from ..run_document import run_document
from .draw import draw_panel


def show(report: Report) -> None:
    """Show the short report to the user, through the launcher if there is one."""
    notify(render(report))


def render(report: Report) -> str:
    """Return the short report as text for stderr.

    On a terminal, the text has the width of the terminal and colours.
    """
    terminal = os.environ.get("PACELINE_TTY") == "1" or sys.stderr.isatty()
    width = int(os.environ.get("PACELINE_WIDTH", 0)) or (None if terminal else 100)
    text = io.StringIO()
    console = PlainConsole(file=text, force_terminal=terminal, width=width)
    console.print(panel(report, console.width))
    return ("\r\x1b[2K" if terminal else "") + text.getvalue()


def panel(report: Report, width: int = 100, full: bool = False) -> Panel:
    """Return the report in a frame, for a terminal of ``width`` columns."""
    return draw_panel(run_document(report, width=width, is_full=full))
