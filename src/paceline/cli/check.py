"""The command ``paceline check``."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from .common.base import MACHINE, app, examples, exit_on_mistake, say
from .common.command import Command, print_json, with_options
from .common.options import HostAndEnvOptions, Json, flag, output_option, value_option

READING = "Reading rate of a dataset"  # headings of options in --help
ENVIRONMENT = "Python environment"
QUICK_S = 0.5  # seconds per measurement of a dataset with --quick
BAD = ("unreachable", "missing", "slow", "link", "version", "parts")  # lead to exit code 1


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The options of ``paceline check``, as typed."""

    ranks: Annotated[
        int | None,
        value_option(
            "Number of ranks. Default: as for paceline run, and at least 2 on each node.",
            "N",
            "-n",
            "--ranks",
        ),
    ] = None
    data: Annotated[
        str | None,
        value_option(
            "Folder whose storage is measured: bandwidth and small files. With a dataset: "
            "measure only how fast it can be read, and what limits the rate.",
            "FOLDER|DATASET",
        ),
    ] = None
    quick: Annotated[bool, flag("--quick", "Measure fewer sizes with fewer repetitions: 10 s.")] = (
        False
    )
    out: Annotated[Path, output_option("Machine file to write.", show_default=True)] = Path(
        "machine.toml"
    )
    compare: Annotated[
        tuple[Path, Path] | None,
        value_option(
            "Compare two machine files and print the differences larger than their "
            "measurement noise. Any difference is printed for at most 5 % of unchanged machines. "
            "Nothing is measured.",
            "BEFORE AFTER",
        ),
    ] = None
    json: Json = None
    nodes: HostAndEnvOptions
    labels: Annotated[
        str | None,
        value_option("Labels of the dataset: see paceline pack.", "LABELS", panel=READING),
    ] = None
    transform: Annotated[
        str | None,
        value_option(
            "Transform of the Loader, importable from this folder.",
            "MODULE:FUNCTION",
            panel=READING,
        ),
    ] = None
    threads: Annotated[
        int | None,
        value_option(
            "Threads of each rank's loader. Default: 2, or the number of cores if smaller.",
            "N",
            panel=READING,
            min=1,
        ),
    ] = None
    pack_env: Annotated[
        bool,
        flag(
            "--pack-env",
            "Pack the Python environment of this command into one file, and measure what "
            "this gains for import torch. Nothing else is measured.",
            panel=ENVIRONMENT,
        ),
    ] = False
    packed: Annotated[
        Path | None,
        output_option(
            "File of --pack-env, ending in .squashfs or .tar. Default: env.squashfs, or "
            "env.tar without mksquashfs.",
            panel=ENVIRONMENT,
        ),
    ] = None


@app.command(
    cls=Command,
    rich_help_panel=MACHINE,
    short_help="Measure nodes, links and storage, and name the slow ones",
    epilog=examples(
        ("paceline check", "this machine, or the allocation"),
        ("paceline check --quick", "about 10 s"),
        ("paceline check --data /scratch/me", "also the storage of a folder"),
        ("salloc -N 4 paceline check --out before.toml", "four nodes, and links"),
        ("paceline check --compare before.toml after.toml", "differences above the noise"),
        ("paceline check --data packed/ -n 4", "reading rate of a dataset"),
        ("paceline check --pack-env", "one file instead of many for Python"),
    ),
)
@with_options
def check(options: CheckOptions) -> None:
    """Measure what this machine, or all nodes of an allocation, can do, before a long job.

    Measured are arithmetic by precision, memory bandwidth, storage, import of torch, collectives
    within and between nodes, every link, clocks, limits and versions. Nodes that are slower than
    the others by more than the noise are named. Nodes that do not answer are named, and the
    others are checked. The figures are stored in a machine file.

    Exit code 1: a node does not answer or is slow, a link is slow, or versions differ.
    """
    with exit_on_mistake():
        code = _run_check(options)
    raise typer.Exit(code)


def _run_check(options: CheckOptions) -> int:
    """Do what the options ask for, print it, and return the exit code. Raises ValueError."""
    data, compare = options.data, options.compare
    if options.packed is not None and not options.pack_env:
        raise ValueError("--packed names the file of --pack-env. HINT: add --pack-env")
    if compare is not None and options.pack_env:
        raise ValueError(
            "--compare and --pack-env can't be used together. HINT: run one after the other"
        )
    if options.pack_env:
        _pack(options.packed, options.json)
        return 0
    if compare is not None:
        _compare(*compare, options.json)
        return 0
    of_a_set = ("labels", "transform", "threads")
    given = [f"--{name}" for name in of_a_set if getattr(options, name) is not None]
    if given and data is None:
        raise ValueError(f"{given[0]} needs a dataset. HINT: add --data DATASET")
    if data is not None and (given or _is_set(data)):
        if others := [*options.nodes.words(), *["--env"] * bool(options.nodes.env)]:
            raise ValueError(
                f"{others[0]}: Paceline measures a dataset on this node only. HINT: start "
                "paceline check --data on the other node (ssh, srun); or use --data FOLDER "
                "for the storage of all nodes"
            )
        _measure_reading(data, options)
        return 0
    return _check_nodes(options)


def _compare(before: Path, after: Path, json: Path | None) -> None:
    from ..cost.compare_machines import compare
    from ..cost.machine.machine_file import load
    from ..report.terminal.check import machines_blocks
    from ..report.terminal.draw import print_blocks

    machines = load(before), load(after)
    changes = compare(*machines)
    if json is not None:
        changed = {"changes": [vars(change) for change in changes]}
        print_json(changed, json, name="paceline-machine-comparison")
    else:
        print_blocks(machines_blocks(*machines, changes))


def _check_nodes(options: CheckOptions) -> int:
    """Measure the nodes, write the machine file, print it, and return the exit code."""
    from ..cost.machine.machine_file import as_json, save
    from ..cost.outliers import find_outliers
    from ..report.terminal.check import check_blocks, check_json
    from ..report.terminal.draw import print_blocks
    from ..study.measuring_jobs import CheckRequest
    from ..study.measuring_jobs import check as measured

    folder = None if options.data is None else Path(options.data)
    checked = measured(CheckRequest(options.nodes, options.ranks, folder, options.quick))
    save(checked.machine, options.out)
    oddities = find_outliers(checked.machine)
    if options.json is not None:
        found = check_json(as_json(checked.machine), oddities, checked.notes, checked.more)
        print_json(found, options.json, name="paceline-check")
    else:
        print_blocks(check_blocks(checked.machine, oddities, checked.notes))
        say(f"the machine file is {options.out}")
    return int(bool(checked.code) or any(oddity.kind in BAD for oddity in oddities))


def _is_set(data: str) -> bool:
    """Return whether a path holds samples: a packed dataset, another format, images or arrays."""
    from itertools import islice

    from ..data.boundary import Boundary
    from ..data.format.shard_format import META_FILE
    from ..data.sources import formats
    from ..data.sources.content import ARRAYS, IMAGES
    from ..data.sources.folder_source import files_below

    path, _ = formats.split_path(data)
    if (path / META_FILE).exists() or formats.detect_format(path) is not None:
        return True
    some = list(islice(files_below(path, Boundary(path)), 100)) if path.is_dir() else []
    return len(some) > 1 and all(name.lower().endswith((*IMAGES, *ARRAYS)) for name in some)


def _measure_reading(data: str, options: CheckOptions) -> None:
    """Measure how fast a dataset can be read on this node, and print it."""
    from ..report.console import PlainConsole
    from ..report.terminal.check import input_rate_blocks
    from ..report.terminal.draw import print_blocks
    from ..study.input_rate import LoadRankConfig, advise

    cores = len(os.sched_getaffinity(0))
    with PlainConsole(stderr=True).status("paceline: reading the dataset") as status:
        config = LoadRankConfig(
            data,
            options.labels,
            options.transform,
            options.threads or min(2, cores),
            ranks=options.ranks or min(2, cores),
            seconds=QUICK_S if options.quick else LoadRankConfig.seconds,
        )
        rate = advise(config, lambda what: status.update(f"paceline: {what}")).as_json()
    if options.json is not None:
        print_json(rate, options.json)
    else:
        print_blocks(input_rate_blocks(rate))


def _pack(file: Path | None, json: Path | None) -> None:
    from ..cost.import_cost import as_json
    from ..report.terminal.check import environment_blocks
    from ..report.terminal.draw import print_blocks
    from ..study.environment.check_packed import pack_environment

    found = pack_environment(file)
    if json is not None:
        print_json(as_json(found), json, name="paceline-environment")
    else:
        print_blocks(environment_blocks(found))
