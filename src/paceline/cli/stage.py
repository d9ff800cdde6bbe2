"""``paceline stage``."""

import os
from collections.abc import Callable
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from .base import app, mistakes_told
from .pack import progress
from .sizes import bytes_of


@app.command(
    epilog="Examples:  paceline stage packed/ /local   ·   "
    "srun --ntasks-per-node=1 paceline stage packed/ /dev/shm --room 100G   ·   "
    "PACELINE_STAGE=/local paceline run train.py",
)
def stage(
    source: Annotated[Path, typer.Argument(help="A packed set, as on the shared file system.")],
    root: Annotated[
        Path | None,
        typer.Argument(
            help="A folder of this host's own: a local disk, or /dev/shm. Default: "
            "$PACELINE_STAGE.",
            show_default=False,
        ),
    ] = None,
    room: Annotated[
        str | None,
        typer.Option(
            help="What all staged sets there may take, as 100G. Default: what is free (in memory: "
            "what the job may still use), but for a tenth.",
            show_default=False,
        ),
    ] = None,
    beside: Annotated[
        bool, typer.Option("--beside", help="Stop when the process that started it has ended.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="JSON on standard output instead of a line.")
    ] = False,
) -> None:
    """Bring a packed set to storage of this host's own, once for all jobs that run here.

    Each shard's checksum is compared. Training may begin meanwhile: with PACELINE_STAGE=ROOT the
    Loader reads what is there from there, and the rest from where it was packed. What other sets
    have left makes room, the longest unused first; shards for which there is none stay where they
    are. Killed, the same command goes on.
    """
    with mistakes_told():
        from ..data.staging import VARIABLE
        from ..data.staging import stage as staged

        given = os.environ.get(VARIABLE) if root is None else str(root)
        if not given:
            raise ValueError("where to? HINT: paceline stage SET ROOT, or PACELINE_STAGE=ROOT")
        most = None if room is None else bytes_of(room, "--room")
        with progress("staged", None, "shards") as said:
            step = _while_it_lives(os.getppid()) if beside else said
            found = staged(source, given, room=most, step=step, waits=None if beside else _waits)
    if json:
        told = asdict(found) | {"folder": str(found.folder)}
        typer.echo(dumps(told))
        return
    from rich.console import Console
    from rich.text import Text

    from ..report.dataset import staged as shown

    console = Console()
    for text, style in shown(asdict(found)):
        console.print(Text(text, style=style))


def _while_it_lives(parent: int) -> Callable[[int, int], None]:
    def step(done: int, size: int) -> None:
        if os.getppid() != parent:
            raise typer.Exit

    return step


def _waits() -> None:
    typer.echo("paceline: another process stages there: waiting for it", err=True)
