"""The command line: one function a command; parse, call, print."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from .cluster.host import devices
from .launch.local import InServer, Job, serve
from .launch.local import run as run_job

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Scale a PyTorch training script, and see where every second of every rank goes.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    pass


@app.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Examples:  paceline run -n 4 train.py --epochs 10   ·   "
    "paceline run -n 2 -m package.train   ·   "
    "paceline run -n 4 --max-restarts 3 train.py",
)
def run(
    script: Annotated[str, typer.Argument(help="The script (or with -m the module) to run.")],
    args: Annotated[
        list[str] | None, typer.Argument(help="What stands after the script is the script's.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n", "--ranks", help="Ranks to start. Default: one a GPU, or one.", show_default=False
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module's name, as in python -m.")
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option(
            help="How often to start again after a failure; a script that uses world.epochs with "
            "a checkpoint goes on from the last one.",
            min=0,
        ),
    ] = 0,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="A new interpreter for every rank instead of a fork of one that has imported "
            "torch. Chosen by itself where OMP_PLACES, KMP_AFFINITY, GOMP_CPU_AFFINITY or "
            "LD_PRELOAD is set.",
        ),
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads a rank computes with. Default: OMP_NUM_THREADS, or cores / ranks.",
            show_default=False,
        ),
    ] = None,
    bind: Annotated[
        str, typer.Option(help="core: each rank keeps to its own part of the cores. none: not.")
    ] = "none",
    port: Annotated[
        int, typer.Option(help="Port of the ranks' store; 0 finds a free one.", min=0, max=65535)
    ] = 0,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Record the script, whatever it is, and keep the record in this folder: see "
            "paceline report.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(help="Write the summary's figures to this file as JSON.", show_default=False),
    ] = None,
) -> None:
    """Run SCRIPT on several ranks of this machine.

    Ranks get torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR ...), so a script
    written for torchrun runs unchanged. Lines that all ranks print are shown once, others carry
    their rank. If a rank fails, the others end within seconds, and the exit code is that rank's.
    """
    job = Job(
        name=script,
        args=args or [],
        module=module,
        ranks=ranks if ranks is not None else max(1, devices()),
        max_restarts=max_restarts,
        fresh=fresh,
        threads=threads,
        bind=bind,
        port=port,
        summary=json,
        record=record,
    )
    try:
        code = run_job(job)
    except ValueError as mistake:
        typer.echo(f"paceline: {mistake}", err=True)
        code = 2
    except KeyboardInterrupt:
        typer.echo("paceline: interrupted before the ranks started", err=True)
        code = 130
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to tear down, and torch takes half a second for it


@app.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Example:  torchrun --nproc-per-node 4 --no-python paceline record run/record train.py",
)
def record(
    folder: Annotated[Path, typer.Argument(help="Where the records go, the same for all ranks.")],
    script: Annotated[str, typer.Argument(help="The script (or with -m the module) to run.")],
    args: Annotated[
        list[str] | None, typer.Argument(help="What stands after the script is the script's.")
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module's name, as in python -m.")
    ] = False,
) -> None:
    """Run SCRIPT as one recorded rank of any launcher: torchrun, srun, mpirun.

    Ranks may be on several hosts, if FOLDER is on a file system that they share.
    """
    from .launch.rank import record_here

    try:
        record_here(folder, {"name": script, "args": args or [], "module": module})
    except ValueError as mistake:
        typer.echo(f"paceline: {mistake}", err=True)
        raise typer.Exit(2) from None


@app.command(
    epilog="Examples:  paceline report run/record   ·   paceline report before after   ·   "
    "paceline report n1 n2 n4   ·   paceline report --steps 100:200 run/record",
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
        bool, typer.Option("--json", help="The figures as JSON instead (docs/measures.md).")
    ] = False,
) -> None:
    """Say what every second of every rank went into.

    One record: states, efficiencies and the three largest losses. Two of the same number of
    ranks: before and after, figure by figure, with what is noise. Several with different numbers
    of ranks: the scaling table.
    """
    from .report.command import told

    try:
        text = told(folders, steps, json)
    except ValueError as mistake:
        typer.echo(f"paceline: {mistake}", err=True)
        raise typer.Exit(2) from None
    typer.echo(text, nl=False)


def main() -> None:
    """The ``paceline`` command."""
    try:
        app()
    except InServer as forked:
        job = forked
    serve(job)  # not in the handler: a rank's exceptions have no context of ours
