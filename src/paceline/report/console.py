"""The console that reports are printed to."""

import os
import sys
from typing import Any

from rich.console import Console

from ..security.text import printable

FILE_WIDTH = 100  # columns of tables that are not printed to a terminal


class PlainConsole(Console):
    """A ``rich.console.Console`` that prints every text literally.

    Names of hosts, groups and folders may contain anything: ``[/b]`` is not interpreted as markup
    and ``:x:`` not as an emoji, and control characters are escaped.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Any:
        """Return a text as rich draws it."""
        return super().render_str(printable(text, lines=True), **options)


def output_width() -> int | None:
    """Return the width for tables on standard output; None: that of the terminal or COLUMNS."""
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else FILE_WIDTH
