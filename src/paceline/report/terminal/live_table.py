"""A table on standard error that shows work while it runs."""

import sys
from types import TracebackType
from typing import Any, Self

from rich.console import RenderableType
from rich.text import Text

from ...security.terminal import for_terminal
from ..console import PlainConsole

REFRESHES_PER_S = 2


class LiveTable:
    """A table on a terminal; lines where standard error is no terminal.

    Used as a context manager: the table is removed at the end, before the result is printed.
    """

    def __init__(self) -> None:
        self._live: Any = None
        self._console: PlainConsole | None = None
        if sys.stderr.isatty():
            from rich.live import Live

            self._console = PlainConsole(stderr=True, highlight=False)
            self._live = Live(
                get_renderable=self._table,
                console=self._console,
                refresh_per_second=REFRESHES_PER_S,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def message(self, text: str) -> None:
        if self._live is not None and self._console is not None:
            self._console.print(Text(f"paceline: {text}"))  # above the table
        else:
            self._write(text)

    def _write(self, text: str) -> None:
        sys.stderr.write(for_terminal(f"paceline: {text}\n"))
        sys.stderr.flush()

    def _table(self) -> RenderableType:
        raise NotImplementedError
