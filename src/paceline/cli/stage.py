"""The command ``paceline stage``."""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common.base import app, exit_on_mistake
from .common.options import Env, Hostfile, Hosts, Launcher
from .common.sizes import bytes_of
from .pack import progress

if TYPE_CHECKING:
    from ..data.staging.fetch_shards import Staged


@app.command(
    epilog="Examples:  paceline stage packed/ /local   ·   "
    "salloc -N 4 paceline stage packed/ /dev/shm --room 100G   ·   "
    "paceline stage packed/ /local -H host1,host2   ·   "
    "PACELINE_STAGE=/local paceline run --stage packed/ train.py",
)
def stage(
    source: Annotated[Path, typer.Argument(help="A packed set, as on the shared file system.")],
    root: Annotated[
        Path | None,
        typer.Argument(
            help="A folder of each host's own: a local disk, or /dev/shm. Default: "
            "$PACELINE_STAGE.",
            show_default=False,
        ),
    ] = None,
    room: Annotated[
        str | None,
        typer.Option(
            help="What all staged sets there may take on a host, as 100G. Default: what is free "
            "(in memory: what the job may still use), but for a tenth.",
            show_default=False,
        ),
    ] = None,
    shared: Annotated[
        bool,
        typer.Option(
            "--shared",
            help="Share the staged set with the group that owns SOURCE, which must be able to read "
            "it there. Default: only you can read what you stage.",
        ),
    ] = False,
    hosts: Hosts = None,
    hostfile: Hostfile = None,
    launcher: Launcher = None,
    env: Env = None,
    beside: Annotated[
        bool,
        typer.Option(
            "--beside",
            help="As paceline run --stage calls it: with the other hosts of the job, until the "
            "process that started it has ended.",
        ),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="JSON on standard output instead of lines.")
    ] = False,
) -> None:
    """Bring a packed set to storage of each host's own, once for all jobs that run there.

    Inside an allocation, or with -H, all its hosts take part: each byte is read once from where
    the set is, by one of them, and the others fetch it from that host. Each shard's checksum is
    compared. A host without room for all keeps a part that no other host has.

    Training may begin meanwhile: with PACELINE_STAGE=ROOT the Loader reads what is there from
    there, and the rest from where it was packed. What other sets have left makes room, the longest
    unused first. Killed, the same command goes on. Exit code 1 where a host could not do its part.
    """
    with exit_on_mistake():
        from ..data.format.shard_format import load_meta
        from ..data.staging.staged_sets import VARIABLE
        from ..study.stage import StageRequest, stage_on_hosts, sum_hosts

        given = os.environ.get(VARIABLE) if root is None else str(root)
        if not given:
            raise ValueError("where to? HINT: paceline stage SET ROOT, or PACELINE_STAGE=ROOT")
        most = None if room is None else bytes_of(room, "--room")
        wish = StageRequest(hosts, hostfile, launcher, tuple(env or []))
        where = None if beside else wish.target()
        if where is not None:
            load_meta(source)
            code, told = stage_on_hosts(
                wish, where, source, str(Path(given).absolute()), most, _say, shared
            )
            if json:
                typer.echo(sum_hosts(told))
            else:
                _show(told)
            raise typer.Exit(code)
        found = _here(source, given, most, beside, shared)
    if beside:
        return
    if json:
        typer.echo(dumps(asdict(found) | {"folder": str(found.folder)}))
    else:
        _show([asdict(found)])


def _here(source: Path, root: str, room: int | None, beside: bool, shared: bool) -> "Staged":
    from ..data.staging.stage import stage as staged

    if not beside:
        with progress("staged", None, "shards") as said:
            return staged(source, root, room=room, step=said, waits=_waits, shared=shared)
    step = _run_guarded_stage(os.getppid())
    found = staged(source, root, room=room, step=step, together=True, ended=_ended)
    if found.hosts and os.environ.get("GROUP_RANK") == "0":
        from ..report.terminal.packed_dataset import render_staged_hosts

        _say(render_staged_hosts(str(source), found.hosts))
    return found


def _ended(found: "Staged") -> None:
    """Print warnings about this host's staging while the script trains."""
    from ..report.terminal.packed_dataset import concerns

    for line in concerns(asdict(found)):
        _say(line)


def _show(told: list[dict[str, Any]]) -> None:
    from rich.text import Text

    from ..report.console import PlainConsole
    from ..report.terminal.packed_dataset import render_staged

    console = PlainConsole()
    for text, style in render_staged(told):
        console.print(Text(text, style=style))


def _say(text: str) -> None:
    sys.stderr.write(f"paceline stage: {text}\n")


def _run_guarded_stage(parent: int) -> Callable[[int, int], None]:
    def step(done: int, size: int) -> None:
        if os.getppid() != parent:
            raise typer.Exit

    return step


def _waits() -> None:
    _say("another process stages there: waiting for it")
