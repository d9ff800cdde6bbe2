"""The command ``paceline stage``."""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common.base import DATASETS, app, examples, exit_on_mistake
from .common.command import Command, print_json, with_options
from .common.options import HostAndEnvOptions, Json, bytes_of, flag, value_option
from .pack import progress

if TYPE_CHECKING:
    from ..data.staging.fetch_shards import Staged


@app.command(
    cls=Command,
    rich_help_panel=DATASETS,
    short_help="Copy a packed dataset to node-local storage",
    epilog=examples(
        ("paceline stage packed/ /local", "this node"),
        ("salloc -N 4 paceline stage packed/ /dev/shm --room 100G", "all nodes of an allocation"),
        ("paceline stage packed/ /local -H host1,host2", "two hosts over ssh"),
        ("PACELINE_STAGE=/local paceline run --stage packed/ train.py", "during a training"),
    ),
)
@with_options
def stage(
    *,
    source: Annotated[Path, typer.Argument(help="Packed dataset on the shared file system.")],
    root: Annotated[
        Path | None,
        typer.Argument(
            help="Node-local folder: a local disk, or /dev/shm. Default: $PACELINE_STAGE.",
            show_default=False,
        ),
    ] = None,
    room: Annotated[
        str | None,
        value_option(
            "Maximum size of all staged datasets on a node: 100G. Default: 90 % of the free "
            "space; in memory, of what the job may still use.",
            "SIZE",
        ),
    ] = None,
    shared: Annotated[
        bool,
        flag(
            "--shared",
            "Share the copy with the group that owns SOURCE, which must be able to read it "
            "there. Default: only you can read it.",
        ),
    ] = False,
    json: Json = None,
    nodes: HostAndEnvOptions,
    beside: Annotated[
        bool,
        typer.Option(
            "--beside",
            help="Used by paceline run --stage: with the other nodes of the job, until the process "
            "that started it has ended.",
            hidden=True,
        ),
    ] = False,
) -> None:
    """Copy a packed dataset to node-local storage, once for all jobs that run there.

    In an allocation, or with -H, all nodes take part: each byte is read once from the shared file
    system by one of them, and the others fetch it from that node. Every shard is compared with
    its checksum. A node without enough space keeps a part that no other node has. The longest
    unused datasets are removed if space is needed.

    Training can start at once: with PACELINE_STAGE=ROOT the Loader reads shards that have arrived
    from there, and the others from SOURCE. If the command is killed, repeat it: it continues.

    Exit code 1: a node could not do its part.
    """
    with exit_on_mistake():
        from ..data.format.shard_format import load_meta
        from ..data.staging.staged_sets import VARIABLE
        from ..study.stage import stage_on_hosts, staging_target, sum_hosts

        given = os.environ.get(VARIABLE) if root is None else str(root)
        if not given:
            raise ValueError(
                "the destination folder is missing. HINT: paceline stage SOURCE ROOT, or "
                "PACELINE_STAGE=ROOT"
            )
        most = None if room is None else bytes_of(room, "--room")
        where = None if beside else staging_target(nodes)
        if where is not None:
            load_meta(source)
            code, of_hosts = stage_on_hosts(
                nodes, where, source, str(Path(given).absolute()), most, _say, shared
            )
            if json is not None:
                print_json(sum_hosts(of_hosts), json, name="paceline-stage")
            else:
                _show(of_hosts)
            raise typer.Exit(code)
        found = _here(source, given, most, beside, shared)
    if beside:
        return
    if json is not None:
        print_json(asdict(found) | {"folder": str(found.folder)}, json, name="paceline-stage")
    else:
        _show([asdict(found)])


def _here(source: Path, root: str, room: int | None, beside: bool, shared: bool) -> "Staged":
    from ..data.staging.stage import stage as staged

    if not beside:
        with progress("staged", None, "shards") as step:
            return staged(source, root, room=room, step=step, waits=_waits, shared=shared)
    step = _exit_with(os.getppid())
    found = staged(source, root, room=room, step=step, together=True, ended=_ended)
    if found.hosts and os.environ.get("GROUP_RANK") == "0":
        from ..report.terminal.packed_dataset import staged_sum

        _say(staged_sum(str(source), found.hosts))
    return found


def _ended(found: "Staged") -> None:
    """Print warnings about this host's staging while the script trains."""
    from ..report.terminal.packed_dataset import concerns

    for line in concerns(asdict(found)):
        _say(line)


def _show(of_hosts: list[dict[str, Any]]) -> None:
    from ..report.terminal.draw import print_blocks
    from ..report.terminal.packed_dataset import staged_lines

    print_blocks(staged_lines(of_hosts))


def _say(text: str) -> None:
    sys.stderr.write(f"paceline stage: {text}\n")


def _exit_with(parent: int) -> Callable[[int, int], None]:
    """Return a function that is called for each part, and exits once ``parent`` has ended."""

    def step(done: int, size: int) -> None:
        if os.getppid() != parent:
            raise typer.Exit

    return step


def _waits() -> None:
    _say("waiting for another process that stages into this folder")
