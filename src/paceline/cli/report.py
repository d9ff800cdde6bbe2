"""The command ``paceline report``."""

from pathlib import Path
from typing import Annotated

import typer

from .common.base import UNDERSTAND, app, examples, exit_on_mistake
from .common.command import STDOUT, Command, json_output
from .common.options import Json


@app.command(
    cls=Command,
    rich_help_panel=UNDERSTAND,
    short_help="Show where the time of a recorded run went; compare runs",
    epilog=examples(
        ("paceline report run/record", "states, efficiencies, losses"),
        ("paceline report run/record --html run.html", "a page for any browser"),
        ("paceline report before after", "compare two runs"),
        ("paceline report n1 n2 n4", "scaling table"),
        ("paceline report run/record --timeline run.json.gz", "a trace for Perfetto"),
    ),
)
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders written by paceline run --record.", metavar="DIR..."),
    ],
    steps: Annotated[
        str | None,
        typer.Option(
            help="Use these steps only: 100:200 is 100 to 199.",
            metavar="FIRST:END",
            show_default=False,
        ),
    ] = None,
    json: Json = None,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write a page with everything inside to this file, for any browser.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="Write states and collectives of every rank to this file, for ui.perfetto.dev "
            "and chrome://tracing. A name that ends in .gz is compressed.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    machine: Annotated[
        Path | None,
        typer.Option(
            help="Machine file (paceline check): place a step of a run with --count-flops on its "
            "roofline.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show where the time of every rank went.

    One record gives states, efficiencies and the three largest losses. Two records of the same
    number of ranks are compared, with the noise of each figure. Records of different numbers of
    ranks give a scaling table. A running job is reported as far as it is recorded.
    """
    from ..launch.monitor.partial_record import load_so_far
    from ..report.report_command import report_text

    with exit_on_mistake():
        text = report_text(folders, steps, json is not None, html, timeline, load_so_far, machine)
        with json_output(json or STDOUT):
            typer.echo(text, nl=False)
