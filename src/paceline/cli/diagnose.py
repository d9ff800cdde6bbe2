"""``paceline diagnose``."""

import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .base import app, mistakes_told

if TYPE_CHECKING:
    from ..report.diagnose import Diagnosis


@app.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Examples:  paceline diagnose -n 4 train.py --epochs 10   ·   "
    "paceline diagnose -H host1:4,host2:4 --minutes 10 train.py   ·   "
    "salloc -N 2 paceline diagnose --json train.py > found.json   ·   "
    "paceline diagnose -n 4 --html found.html train.py",
)
def diagnose(
    script: Annotated[str, typer.Argument(help="The script (or with -m the module) to diagnose.")],
    args: Annotated[
        list[str] | None, typer.Argument(help="What stands after the script is the script's.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n", "--ranks", help="Ranks, in all. Default: as paceline run.", show_default=False
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option("-H", "--hosts", help="Hosts, as paceline run has them.", show_default=False),
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="The hosts from a file.", show_default=False)
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="A variable that all ranks get, as NAME=VALUE.", show_default=False),
    ] = None,
    launcher: Annotated[
        str | None, typer.Option(help="What starts an agent on each host.", show_default=False)
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module's name, as in python -m.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(help="Threads a rank computes with.", show_default=False)
    ] = None,
    bind: Annotated[
        str | None, typer.Option(help="As paceline run has it.", show_default=False)
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(help="What it may take, about; more repetitions make it surer.", min=0.2),
    ] = 5.0,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Optimizer steps that each short run measures. Default: what the budget allows, "
            "10 to 400.",
            min=3,
            show_default=False,
        ),
    ] = None,
    warm_up: Annotated[
        int, typer.Option("--warm-up", help="Steps before the measured ones.", min=1)
    ] = 5,
    json: Annotated[
        bool, typer.Option("--json", help="JSON on standard output (docs/diagnose.md).")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write a page to this file: the causes with their evidence, in words and "
            "pictures, for any browser, with everything inside.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run SCRIPT a few steps at a time, each time with something switched off, and say what holds
    it back: the exchange, the loader, a slow rank, ranks that share the machine.

    Nothing in the script changes, and none of its files: new ones go to a scratch folder, and a
    run that would change an existing file is stopped and says so.
    """
    from ..report import diagnose as shown
    from ..study.diagnose import diagnosed
    from ..study.ladder import Asked

    options = ["-m"] * module
    for name, value in (("--threads", threads), ("--bind", bind)):
        options += [name, str(value)] if value is not None else []
    for variable in env or []:
        options += ["--env", variable]
    where = ["-H", hosts] if hosts else []
    where += ["--hostfile", str(hostfile)] if hostfile else []
    where += ["--launcher", launcher] if launcher else []
    asked = Asked(script, args or [], where, options, ranks, minutes, steps, warm_up)
    with mistakes_told():
        if html is not None:
            _can_be_written(html)
        found = diagnosed(asked, _progress)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[2K")
    if json:
        typer.echo(dumps(shown.as_json(found), indent=1))
    else:
        from rich.console import Console

        console = Console()
        console.print(shown.drawn(found, console.width))
    if html is not None:
        _written(found, html, json)


def _can_be_written(path: Path) -> None:
    """Said before the minutes that a diagnosis takes."""
    why = "it is a folder" if path.is_dir() else ""
    why = why or ("" if path.parent.is_dir() else f"{path.parent} is no folder")
    if why:
        raise ValueError(
            f"--html {path} can't be written: {why}. HINT: a file in a folder that exists"
        )


def _written(found: "Diagnosis", path: Path, json: bool) -> None:
    """The page. What is said of it goes beside the JSON, not into it."""
    from ..report.page.diagnosis import diagnosis
    from ..report.page.write import save
    from ..study.ladder import WORDS

    with mistakes_told():
        typer.echo(save(diagnosis(found, WORDS), path), err=json)


def _progress(text: str) -> None:
    """In place on a terminal, else a line each."""
    terminal = sys.stderr.isatty()
    sys.stderr.write(f"\r\x1b[2Kpaceline: {text}" if terminal else f"paceline: {text}\n")
    sys.stderr.flush()
