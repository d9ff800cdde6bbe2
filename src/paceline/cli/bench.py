"""The command ``paceline bench``."""

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from .common.base import app, exit_on_mistake
from .common.options import Hostfile, Hosts, Launcher
from .common.sizes import bytes_of

_bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure parts of this machine, or of an allocation, against each other.",
)
app.add_typer(_bench, name="bench")


@_bench.callback()
def _only() -> None:
    pass


@_bench.command(
    epilog="Examples:  paceline bench comm -n 4   ·   "
    "paceline bench comm --operation all-gather   ·   "
    "paceline bench comm -H host1:2,host2:2 --to 16M   ·   "
    "paceline bench comm --machine machine.toml",
)
def comm(
    operation: Annotated[
        str,
        typer.Option(help="all-reduce, all-gather, reduce-scatter or all-to-all."),
    ] = "all-reduce",
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Ranks, in all.", min=2)] = 2,
    hosts: Hosts = None,
    hostfile: Hostfile = None,
    launcher: Launcher = None,
    largest: Annotated[
        str, typer.Option("--to", help="The largest vector, as 64K, 16M or 1G.")
    ] = "256M",
    bind: Annotated[
        str | None,
        typer.Option(
            help="As paceline run has it. Default: core, where each rank can have one.",
            show_default=False,
        ),
    ] = None,
    machine: Annotated[
        Path | None,
        typer.Option(
            help="A machine file (paceline check), to which the figures are added.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="JSON on standard output instead of a table.")
    ] = False,
) -> None:
    """Collectives by size: time, algorithm and bus bandwidth as nccl-tests has them.

    gloo, Paceline's own (memory in a host, and once between hosts), NCCL where there are GPUs, MPI
    where mpi4py and mpirun are installed; in turns, and beside a copy of as many bytes in memory.
    """
    from ..cost.machine.machine_file import load, save
    from ..report.console import PlainConsole
    from ..report.terminal import bench_comm as shown
    from ..study.bench_comm import SIZES, BenchRequest, bench, merge_collectives

    with exit_on_mistake():
        before = load(machine) if machine is not None else None
        most = bytes_of(largest, "--to")
        sizes = tuple(one for one in SIZES if one <= most)
        if not sizes:
            raise ValueError(f"--to {largest}: less than the smallest vector. HINT: 1K or more")
        wish = BenchRequest(operation, sizes, ranks, hosts, hostfile, launcher, bind)
        found = bench(wish, lambda text: typer.echo(f"paceline: {text}", err=True))
        if before is not None and machine is not None:
            save(merge_collectives(before, found.collectives), machine)
            typer.echo(f"paceline: the figures are in {machine}", err=True)
    if json:
        typer.echo(dumps(shown.as_json(found.collectives, found.copies, found.notes)))
    else:
        PlainConsole().print(shown.render(found.collectives, found.copies, found.notes))
