"""The command ``paceline report``."""

from pathlib import Path
from typing import Annotated

import typer

from .common.base import UNDERSTAND, app, examples, exit_on_mistake
from .common.command import STDOUT, Command, json_output
from .common.options import Json, output_option, value_option

MAX_GATE = 10.0  # largest value of --gate, as a share of the step time: 1000 %


@app.command(
    cls=Command,
    rich_help_panel=UNDERSTAND,
    short_help="Show where the time of a recorded run went; compare runs",
    epilog=examples(
        ("paceline report run/record", "states, efficiencies, losses"),
        ("paceline report run/record --html run.html", "a page for any browser"),
        ("paceline report before after", "compare two runs"),
        ("paceline report --gate 5% --baseline a1 --baseline a2 new", "for a nightly job"),
        ("paceline report n1 n2 n4", "scaling table"),
        ("paceline report run/record --timeline run.json.gz", "a trace for Perfetto"),
    ),
)
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders written by paceline run --record.", metavar="DIR..."),
    ],
    baseline: Annotated[
        list[Path] | None,
        value_option(
            "Record of a run to compare DIR... with. May be repeated: with two or more runs "
            "of each kind, or three of one, the noise between runs is measured.",
            "DIR",
        ),
    ] = None,
    gate: Annotated[
        str | None,
        value_option(
            "End with exit code 1 if the second of two records, or DIR... compared with "
            "--baseline, has longer steps by more than this and the noise.",
            "PERCENT%",
        ),
    ] = None,
    steps: Annotated[
        str | None,
        value_option("Use only the steps from FIRST to END - 1, as in 100:200.", "FIRST:END"),
    ] = None,
    json: Json = None,
    html: Annotated[
        Path | None,
        output_option("Write a self-contained HTML page to this file."),
    ] = None,
    timeline: Annotated[
        Path | None,
        output_option(
            "Write states and collectives of every rank to this file, for ui.perfetto.dev "
            "and chrome://tracing. A name that ends in .gz is compressed."
        ),
    ] = None,
    machine: Annotated[
        Path | None,
        value_option(
            "Machine file of paceline check. Place a step of the run on the machine's roofline; "
            "the run needs --count-flops.",
            "FILE",
        ),
    ] = None,
) -> None:
    """Show where the time of every rank went.

    One record gives states, efficiencies and the three largest losses. Two records of the same
    number of ranks are compared, with the noise of each figure; --baseline compares several.
    Records of different numbers of ranks give a scaling table. The report of a running job covers
    what is recorded until now.
    """
    from ..launch.monitor.running_jobs import load_so_far
    from ..report.report_command import make_report

    with exit_on_mistake():
        tolerance = _parse_gate(gate) if gate is not None else None
        output = make_report(
            folders,
            steps,
            as_json=json is not None,
            html=html,
            timeline=timeline,
            load=load_so_far,
            machine=machine,
            baseline=baseline or (),
            tolerance=tolerance,
        )
        with json_output(json or STDOUT):
            typer.echo(output.text, nl=False)
    if output.gate is not None and output.gate.verdict == "slower":
        raise typer.Exit(1)


def _parse_gate(text: str) -> float:
    """Return the tolerance of --gate, as in "5%", as a share.

    Raises:
        ValueError: The text is not a percentage from 0% to 1000%.
    """
    number, percent, rest = text.partition("%")
    try:
        share = float(number) / 100
    except ValueError:
        share = -1.0
    if not percent or rest or not 0 <= share <= MAX_GATE:
        raise ValueError(f"--gate {text} is not understood. HINT: 0% to 1000%, as in --gate 5%")
    return share
