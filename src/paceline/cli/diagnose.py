"""The command ``paceline diagnose``."""

import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common.base import app, exit_on_mistake
from .common.options import (
    Args,
    Bind,
    CpusPerRank,
    Env,
    Fresh,
    HangTimeout,
    Hostfile,
    Hosts,
    Launcher,
    Module,
    Ranks,
    Script,
    Settings,
    Smt,
    Threads,
    can_be_written,
    knobs_of,
)
from .common.script_options import ScriptCommand

if TYPE_CHECKING:
    from ..report.terminal.diagnose import Diagnosis


@app.command(
    cls=ScriptCommand,
    context_settings={"allow_interspersed_args": False},
    epilog="Examples:  paceline diagnose -n 4 train.py --epochs 10   ·   "
    "paceline diagnose -H host1:4,host2:4 --minutes 10 train.py   ·   "
    "salloc -N 2 paceline diagnose --json train.py > found.json   ·   "
    "paceline diagnose -n 4 --html found.html train.py   ·   "
    "paceline diagnose -n 4 --try all --save-settings fast.toml train.py",
)
def diagnose(
    script: Script,
    args: Args = None,
    ranks: Ranks = None,
    hosts: Hosts = None,
    hostfile: Hostfile = None,
    env: Env = None,
    launcher: Launcher = None,
    module: Module = False,
    threads: Threads = None,
    bind: Bind = "auto",
    cpus_per_rank: CpusPerRank = None,
    smt: Smt = None,
    fresh: Fresh = False,
    hang_timeout: HangTimeout = None,
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
    settings: Settings = None,
    try_: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            metavar="NAME[=VALUE]",
            help="Set this remedy (or all: the best predicted first), measure it in turns with "
            "the training as it was, and keep it if it helped. Repeatable; takes as long again.",
            show_default=False,
        ),
    ] = None,
    save_settings: Annotated[
        Path | None,
        typer.Option(
            help="With --try: write what helped to this file, for paceline run --settings.",
            show_default=False,
        ),
    ] = None,
    machine: Annotated[
        Path | None,
        typer.Option(
            help="A machine file (paceline check): also how near computing comes to the limits "
            "that were measured there.",
            show_default=False,
        ),
    ] = None,
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
    it back: a loader that starts, reads, computes or waits, an exchange of too many or too large
    messages, a rank or host that is slower and since when, threads and cores, what the script does
    beside its steps and in which line.

    Each cause comes with its remedies and what they would gain; --try sets those that can be set
    from outside, proves them, and --save-settings keeps them for paceline run --settings.

    Nothing in the script changes, and none of its files: new ones go to a scratch folder, and a
    run that would change an existing file is stopped and says so.
    """
    from ..cost.machine.machine_file import load
    from ..report.terminal import diagnose as shown
    from ..study.diagnose.diagnose import run_diagnosis, try_all
    from ..study.diagnose.run_script import RunRequest
    from ..study.diagnose.save_settings import save_kept_settings
    from ..study.diagnose.try_remedies import check_arguments

    options = ["-m"] * module + ["--fresh"] * fresh
    if smt is not None:
        options.append("--smt" if smt else "--no-smt")
    for name, value in {
        "--threads": threads,
        "--bind": bind,
        "--cpus-per-rank": cpus_per_rank,
        "--hang-timeout": hang_timeout,
    }.items():
        options += [name, str(value)] if value is not None else []
    for variable in env or []:
        options += ["--env", variable]
    where = ["-H", hosts] if hosts else []
    where += ["--hostfile", str(hostfile)] if hostfile else []
    where += ["--launcher", launcher] if launcher else []
    with exit_on_mistake():
        check_arguments(try_ or [])
        if save_settings is not None:
            if not try_:
                raise ValueError("--save-settings: nothing is tried. HINT: with --try all")
            can_be_written(save_settings, "--save-settings")
        if html is not None:
            can_be_written(html, "--html")
        known = load(machine) if machine is not None else None
        knobs = knobs_of(settings, script)
        asked = RunRequest(
            script, args or [], where, options, ranks, minutes, steps, warm_up, settings=knobs
        )
        found = run_diagnosis(asked, _progress, known)
        if try_:
            found = try_all(asked, found, try_, _progress)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[2K")
    if json:
        typer.echo(dumps(shown.as_json(found), indent=1))
    else:
        from ..report.console import PlainConsole

        console = PlainConsole()
        console.print(shown.render(found, console.width))
    if save_settings is not None:
        typer.echo(save_kept_settings(found, save_settings), err=json)
    if html is not None:
        _written(found, html, json)


def _written(found: "Diagnosis", path: Path, json: bool) -> None:
    """Write the HTML page; with JSON on stdout, print the message about it to stderr."""
    from ..report.page.diagnosis_page import diagnosis
    from ..report.page.write_page import save
    from ..study.diagnose.ladder import WORDS

    with exit_on_mistake():
        typer.echo(save(diagnosis(found, WORDS), path), err=json)


def _progress(text: str) -> None:
    """Print progress to stderr: in one line on a terminal, else one line per message."""
    terminal = sys.stderr.isatty()
    sys.stderr.write(f"\r\x1b[2Kpaceline: {text}" if terminal else f"paceline: {text}\n")
    sys.stderr.flush()
