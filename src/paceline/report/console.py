"""The console that reports are printed to."""

import os
import sys
from typing import Any, Self

from rich.console import Console, RenderableType

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


class LiveDisplay:
    """Something that is redrawn on standard error, if that is a terminal.

    Used as a context manager, which removes it at its end. ``_live`` is None without a terminal.

    Args:
        refreshes_per_s: How often it is redrawn.
    """

    def __init__(self, refreshes_per_s: float) -> None:
        self._live: Any = None
        self._console: PlainConsole | None = None
        if sys.stderr.isatty():
            from rich.live import Live

            self._console = PlainConsole(stderr=True, highlight=False)
            self._live = Live(
                get_renderable=self._draw,
                console=self._console,
                refresh_per_second=refreshes_per_s,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove it from the terminal, before other output or at the end."""
        if self._live is not None:
            self._live.stop()

    def _draw(self) -> RenderableType:
        raise NotImplementedError


def output_width() -> int | None:
    """Return the width for tables on standard output; None: that of the terminal or COLUMNS."""
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else FILE_WIDTH
