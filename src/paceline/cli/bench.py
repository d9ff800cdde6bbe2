"""The command ``paceline bench``."""

from pathlib import Path
from typing import Annotated

import typer

from .common.base import MACHINE, app, examples, exit_on_mistake, say
from .common.command import Command, print_json, with_options
from .common.options import HostOptions, Json, bytes_of, output_option, value_option

_bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure parts of a machine or an allocation in detail.",
)
app.add_typer(
    _bench,
    name="bench",
    rich_help_panel=MACHINE,
    short_help="Measure collectives by message size, for each backend",
)


@_bench.callback()
def _only() -> None:
    pass


@_bench.command(
    cls=Command,
    short_help="Measure collectives by message size, for each backend",
    epilog=examples(
        ("paceline bench comm -n 4", "4 ranks on this machine"),
        ("paceline bench comm --operation all-gather", "another collective"),
        ("paceline bench comm -H host1:2,host2:2 --to 16M", "two hosts, up to 16 MiB"),
        ("paceline bench comm --machine machine.toml", "add the figures to a machine file"),
    ),
)
@with_options
def comm(
    *,
    ranks: Annotated[
        int, value_option("Number of ranks.", "N", "-n", "--ranks", min=2, show_default=True)
    ] = 2,
    operation: Annotated[
        str,
        value_option(
            "all-reduce, all-gather, reduce-scatter or all-to-all.", "COLLECTIVE", show_default=True
        ),
    ] = "all-reduce",
    largest: Annotated[
        str, value_option("Largest vector: 64K, 16M, 1G.", "SIZE", "--to", show_default=True)
    ] = "256M",
    machine: Annotated[
        Path | None, output_option("Machine file (paceline check) to which the figures are added.")
    ] = None,
    json: Json = None,
    bind: Annotated[
        str | None,
        value_option("See paceline run. Default: core, if each rank can have one.", "HOW"),
    ] = None,
    nodes: HostOptions,
) -> None:
    """Measure collectives by message size: time, algorithm and bus bandwidth as in nccl-tests.

    Backends: gloo; Paceline's own (memory within a node, once per node between nodes); NCCL with
    GPUs; MPI if mpi4py and mpirun are installed. Measurements are interleaved, and compared with
    a copy of as many bytes in memory.
    """
    from ..cost.machine.machine_file import load, save
    from ..report.terminal import check as shown
    from ..report.terminal.draw import print_blocks
    from ..study.measuring_jobs import SIZES, BenchRequest, bench, merge_collectives

    with exit_on_mistake():
        before = load(machine) if machine is not None else None
        most = bytes_of(largest, "--to")
        sizes = tuple(size for size in SIZES if size <= most)
        if not sizes:
            raise ValueError(
                f"--to must be 1K or more, the smallest vector; this is {largest}. HINT: --to 1K"
            )
        wish = BenchRequest(operation, sizes, ranks, nodes, bind)
        found = bench(wish, say)
        if before is not None and machine is not None:
            save(merge_collectives(before, found.collectives), machine)
            say(f"the figures are in {machine}")
    if json is not None:
        print_json(shown.bench_json(found.collectives, found.copies, found.notes), json)
    else:
        print_blocks(shown.bench_blocks(found.collectives, found.copies, found.notes))
