"""The command ``paceline top``."""

from pathlib import Path
from typing import Annotated

import typer

from .common.base import app, exit_on_mistake


@app.command(
    epilog="Examples:  paceline top run/record   ·   paceline top   ·   "
    "paceline top --once --json run/record",
)
def top(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="The folder given to paceline run --record. Default: the only job here.",
            show_default=False,
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(help="A running job by its name, as paceline top lists them."),
    ] = None,
    every: Annotated[float, typer.Option(help="Seconds between two views.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One view, and no more.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="A view as a line of JSON instead (docs/live.md).")
    ] = False,
) -> None:
    """Look at a running job: speed, where the time goes, who waits for whom, what stands still.

    On the host where paceline run was started all hosts of the job are seen. It reads the ends
    of the ranks' records, at the lowest priority, and asks nothing of the ranks. Without --record
    there is something to see of scripts that call paceline.init().
    """
    from ..launch.monitor.top import top as shown

    try:
        with exit_on_mistake():
            code = shown(folder, job, every, once, json)
    except KeyboardInterrupt:
        code = 130
    raise typer.Exit(code)
