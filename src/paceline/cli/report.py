"""The command ``paceline report``."""

from pathlib import Path
from typing import Annotated

import typer

from .common.base import app, exit_on_mistake


@app.command(
    epilog="Examples:  paceline report run/record   ·   paceline report n1 n2 n4   ·   "
    "paceline report run/record --html run.html   ·   "
    "paceline report before after --html change.html   ·   "
    "paceline report --steps 100:200 --timeline run.json.gz run/record"
)
def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders that paceline run --record has written.")
    ],
    steps: Annotated[
        str | None,
        typer.Option(help="Only these steps, as 100:200 (100 to 199).", show_default=False),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON (docs/reference/measures.md).")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write a page to this file: the figures in words and pictures, for any browser, "
            "with everything inside.",
            show_default=False,
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="Write every rank's states and collectives to this file, for ui.perfetto.dev or "
            "chrome://tracing; ending in .gz it is compressed.",
            show_default=False,
        ),
    ] = None,
    machine: Annotated[
        Path | None,
        typer.Option(
            help="A machine file (paceline check): a step of a run with --count-flops is placed "
            "on its roofline.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Say what every second of every rank went into.

    One record: states, efficiencies and the three largest losses. Two of the same number of
    ranks: before and after, figure by figure, with what is noise. Several with different numbers
    of ranks: the scaling table. Of a job that still runs: what there is so far.
    """
    from ..launch.monitor.partial_record import load_so_far
    from ..report.report_command import report_text

    with exit_on_mistake():
        typer.echo(
            report_text(folders, steps, json, html, timeline, load_so_far, machine), nl=False
        )
