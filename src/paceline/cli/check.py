"""The command ``paceline check``."""

import sys
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from .common.base import app, exit_on_mistake

QUICK_S = 0.5  # seconds per measurement of a dataset with --quick
BAD = ("unreachable", "missing", "slow", "link", "version", "parts")  # lead to exit code 1


@app.command(
    epilog="Examples:  paceline check   ·   paceline check --data /scratch/me   ·   "
    "salloc -N 4 paceline check --out before.toml   ·   "
    "paceline check --data packed/ -n 4   ·   "
    "paceline check --compare before.toml after.toml   ·   "
    "paceline check --pack-env",
)
def check(
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--compare",
            help="Measure nothing: what differs between two machine files, by more than their "
            "spread.",
            metavar="BEFORE AFTER",
            show_default=False,
        ),
    ] = None,
    pack_env: Annotated[
        bool,
        typer.Option(
            "--pack-env",
            help="Only this: pack the environment that runs this into one file, and show what "
            "that changes for import torch.",
        ),
    ] = False,
    packed: Annotated[
        Path | None,
        typer.Option(
            help="The file of --pack-env, .squashfs or .tar. Default: env.squashfs here; without "
            "mksquashfs env.tar.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="A folder whose storage is measured: bandwidth and small files, read and write. "
            "With a set of samples only this: how fast it can be read here, and what limits that.",
            metavar="FOLDER|SET",
            show_default=False,
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(help="Of a set, as paceline pack has it.", show_default=False),
    ] = None,
    transform: Annotated[
        str | None,
        typer.Option(
            help="What the Loader does with each sample, importable from here.",
            metavar="MODULE:FUNCTION",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Of each rank's loader. Default: as the Loader has them.",
            min=1,
            show_default=False,
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option("-H", "--hosts", help="Hosts, as paceline run has them.", show_default=False),
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="The hosts from a file.", show_default=False)
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(help="What starts an agent on each host.", show_default=False),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="A variable on all hosts, as NAME or NAME=VALUE.", show_default=False),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--ranks",
            help="Ranks in all. Default: as paceline run, and at least 2 on each host.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer sizes and repetitions: about 10 s.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="The machine file to write.")] = Path(
        "machine.toml"
    ),
    json: Annotated[
        bool, typer.Option("--json", help="JSON on standard output instead of tables.")
    ] = False,
) -> None:
    """What this machine, or all hosts of the allocation, can do, before the allocation is burnt.

    Versions, limits, masks, clocks; arithmetic by precision, memory bandwidth, storage, import of
    torch; collectives in each host and between hosts, every link. What is odd is red: a host that
    is slower than its peers by more than the spread is named. Hosts that do not answer are named,
    and the rest is checked. The figures go to a machine file.

    Exit code 1 where a host does not answer, or is slower than others, or versions differ.
    """
    from ..report.console import PlainConsole
    from ..report.terminal import check as shown

    with exit_on_mistake():
        if packed is not None and not pack_env:
            raise ValueError("--packed names the file of --pack-env. HINT: give both")
        if compare is not None and pack_env:
            raise ValueError("--compare and --pack-env are two things. HINT: one after the other")
        if pack_env:
            _pack(packed, json)
            return
        if compare is not None:
            from ..cost.compare_machines import compare as changes
            from ..cost.machine.machine_file import load

            before, after = map(load, compare)
            found = changes(before, after)
            if json:
                typer.echo(dumps([vars(change) for change in found]))
            else:
                PlainConsole().print(shown.render_comparison(before, after, found))
            return
        of_a_set = {"--labels": labels, "--transform": transform, "--threads": threads}
        given = [name for name, value in of_a_set.items() if value is not None]
        if given and data is None:
            raise ValueError(f"{given[0]} is of a set. HINT: --data SET")
        if data is not None and (given or _is_set(data)):
            elsewhere = {"-H": hosts, "--hostfile": hostfile, "--launcher": launcher, "--env": env}
            if others := [name for name, value in elsewhere.items() if value]:
                raise ValueError(
                    f"{others[0]}: a set is looked at on this host. HINT: start paceline check "
                    "--data there (ssh, srun); or --data FOLDER, for the storage of all hosts"
                )
            _feed(data, labels, transform, threads, ranks, quick, json)
            return
        from ..cost.machine.machine_file import as_json, save
        from ..cost.outliers.outliers import find_outliers
        from ..study.check import CheckRequest
        from ..study.check import check as measured

        folder = None if data is None else Path(data)
        wish = CheckRequest(hosts, hostfile, launcher, tuple(env or ()), ranks, folder, quick)
        checked = measured(wish)
        save(checked.machine, out)
    oddities = find_outliers(checked.machine)
    if json:
        found_json = shown.as_json(as_json(checked.machine), oddities, checked.notes, checked.more)
        typer.echo(dumps(found_json))
    else:
        PlainConsole().print(shown.render(checked.machine, oddities, checked.notes))
        sys.stderr.write(f"paceline: the machine file is {out}\n")
    raise typer.Exit(int(bool(checked.code) or any(one.kind in BAD for one in oddities)))


def _is_set(data: str) -> bool:
    """Return whether a path holds samples: a packed dataset, another format, images or arrays."""
    from itertools import islice

    from ..data.format.shard_format import META_FILE
    from ..data.sources import formats
    from ..data.sources.folder_source import files_below
    from ..data.sources.source import ARRAYS, IMAGES

    path, _ = formats.split_path(data)
    if (path / META_FILE).exists() or formats.detect_format(path) is not None:
        return True
    some = list(islice(files_below(path), 100)) if path.is_dir() else []
    return len(some) > 1 and all(name.lower().endswith((*IMAGES, *ARRAYS)) for name in some)


def _feed(
    data: str,
    labels: str | None,
    transform: str | None,
    threads: int | None,
    ranks: int | None,
    quick: bool,
    json: bool,
) -> None:
    import os

    from ..report.console import PlainConsole
    from ..report.terminal.input_rate import render
    from ..study.input_rate import LoadRankConfig, advise

    cores = len(os.sched_getaffinity(0))
    console = PlainConsole(stderr=True)
    with console.status("paceline: looking at the set") as status:
        feed = LoadRankConfig(
            data,
            labels,
            transform,
            threads or min(2, cores),
            ranks=ranks or min(2, cores),
            seconds=QUICK_S if quick else LoadRankConfig.seconds,
        )
        found = advise(feed, lambda what: status.update(f"paceline: {what}"))
    told = found.as_json()
    if json:
        typer.echo(dumps(told))
        return
    PlainConsole().print(render(told))


def _pack(file: Path | None, json: bool) -> None:
    from ..cost.import_cost import as_json
    from ..report.console import PlainConsole
    from ..report.terminal import packed_environment as shown
    from ..study.environment.check_packed import pack_environment

    found = pack_environment(file)
    if json:
        typer.echo(dumps(as_json(found)))
    else:
        PlainConsole().print(shown.render(found))
