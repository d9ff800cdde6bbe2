"""The command ``paceline top``."""

from pathlib import Path
from typing import Annotated

import typer

from .common.base import UNDERSTAND, app, examples, exit_on_mistake
from .common.command import STDOUT, Command, json_output
from .common.options import Json, flag, value_option


@app.command(
    cls=Command,
    rich_help_panel=UNDERSTAND,
    short_help="Watch a running job: speed, states, slowest rank, hangs",
    epilog=examples(
        ("paceline top run/record", "the job that records into this folder"),
        ("paceline top", "your only job on this node"),
        ("paceline top --once --json run/record", "one view as JSON"),
    ),
)
def top(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of paceline run --record. Default: your only job on this node.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    job: Annotated[
        str | None, value_option("Name of a running job, as paceline top lists them.", "NAME")
    ] = None,
    every: Annotated[
        float, value_option("Seconds between views.", "SECONDS", show_default=True)
    ] = 2.0,
    once: Annotated[bool, flag("--once", "Show one view and exit.")] = False,
    json: Json = None,
) -> None:
    """Watch a running job: speed, states, who waits for whom, and collectives that hang.

    On the node where paceline run was started, all nodes of the job are shown. The command reads
    the records in memory with the lowest priority, and asks nothing of the ranks. A job without
    --record is visible if its script calls paceline.init(). With --json, each view is a line.
    """
    from ..launch.monitor.top import top as shown

    try:
        with exit_on_mistake(), json_output(json or STDOUT):
            code = shown(folder, job, every, once, json is not None)
    except KeyboardInterrupt:
        code = 130
    raise typer.Exit(code)
