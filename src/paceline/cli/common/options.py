"""Options shared by several commands: the script, its ranks, and where and how they run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...security.text import printable

if TYPE_CHECKING:  # every command imports this module
    from ...knobs.tuning import Tuning

Script = Annotated[str, typer.Argument(help="The script (or with -m the module) to run.")]
Args = Annotated[
    list[str] | None,
    typer.Argument(
        help="Arguments passed to the script unchanged. Options of this command come before the "
        "script; `--` before the script says that all that follows is meant for it."
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--ranks",
        help="Ranks to start, in all. Default: on each host its GPUs; else the scheduler's "
        "tasks; else its NUMA domains.",
        show_default=False,
    ),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        "-H",
        "--hosts",
        help="Hosts and their slots, as host1:4,host2:4; reached over ssh.",
        show_default=False,
    ),
]
Hostfile = Annotated[
    Path | None,
    typer.Option(
        help="The hosts from a file: one a line, as host1, host1:4 or host1 slots=4.",
        show_default=False,
    ),
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        help="A variable that all ranks get, as NAME or NAME=VALUE. Repeatable. (Over ssh, "
        "PATH, VIRTUAL_ENV, OMP_*, NCCL_* and the like travel by themselves.)",
        show_default=False,
    ),
]
Launcher = Annotated[
    str | None,
    typer.Option(
        help="What starts an agent on each host: ssh, srun, jsrun, blaunch, palsrun, flux, "
        "mpirun or mpiexec. Default: the allocation's own, or ssh.",
        show_default=False,
    ),
]
Module = Annotated[
    bool, typer.Option("-m", "--module", help="SCRIPT is a module's name, as in python -m.")
]
Fresh = Annotated[
    bool,
    typer.Option(
        "--fresh",
        help="A new interpreter for every rank instead of a fork of one that has imported "
        "torch. Chosen by itself where OMP_PLACES, KMP_AFFINITY, GOMP_CPU_AFFINITY or "
        "LD_PRELOAD is set.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="Threads a rank computes with. Default: OMP_NUM_THREADS, or one for each of its "
        "cores.",
        show_default=False,
    ),
]
Bind = Annotated[
    str,
    typer.Option(
        help="core: each rank keeps to cores of its own, of one NUMA node where possible. "
        "device: to cores near its GPU. numa, socket: to a whole NUMA node or socket. none: "
        "not. auto: device or core where the cores are known to be this job's alone (granted "
        "by a scheduler, a container or taskset), else none."
    ),
]
CpusPerRank = Annotated[
    int | None,
    typer.Option(
        help="Cores of each rank. Default: an equal part of those that are granted.",
        show_default=False,
    ),
]
Smt = Annotated[
    bool | None,
    typer.Option(
        "--smt/--no-smt",
        help="A thread for each hardware thread of a rank's cores, or only one hardware "
        "thread of each. Default: all are its own, and it has a thread for each core.",
        show_default=False,
    ),
]
HangTimeout = Annotated[
    float | None,
    typer.Option(
        help="End the job (exit code 124), or restart it, after so many seconds in which no rank "
        "begins or ends an operation, and three times the longest such time so far. Paceline "
        "reports which ranks are missing from which collective, with all stacks. Default: 300 s, "
        "and the report is only a warning unless ranks wait in a collective that can't complete. "
        "0: never.",
        metavar="SECONDS",
        show_default=False,
    ),
]
Settings = Annotated[
    Path | None,
    typer.Option(
        help="Knobs to set in every rank, from this file (paceline diagnose --try, "
        "docs/remedies.md): loader workers, DDP's buckets, threads and the like.",
        show_default=False,
    ),
]


Exchange = Annotated[
    str | None,
    typer.Option(
        help="paceline: CPU ranks of a host exchange over memory that they share, and hosts once "
        "for all of theirs, also in a script that asks for gloo. gloo: they never do. Default: "
        "where the script uses paceline's own world or backend.",
        show_default=False,
    ),
]

TuneExchange = Annotated[
    Path | None,
    typer.Option(
        help="In the first hundred steps, find the bucket size and the way of exchange that are "
        "fastest for this script's DDP, and keep them in this file, a settings file: runs of the "
        "same model on as many ranks and hosts take it from there. What is not faster than "
        "before, in turns, is not taken.",
        metavar="FILE",
        show_default=False,
    ),
]
TuneCompression = Annotated[
    bool,
    typer.Option(
        "--tune-compression",
        help="With --tune-exchange: gradients that travel as bfloat16 may be taken as well. "
        "That changes the numbers.",
    ),
]


def knobs_of(settings: Path | None, script: str, exchange: str | None = None) -> dict[str, Any]:
    """Return the knobs that --settings and --exchange set; print a message for ignored ones.

    Raises:
        ValueError: The settings file is not valid, or the exchange is unknown.
    """
    if settings is None and exchange is None:
        return {}
    from ...knobs.registry import KNOBS
    from ...knobs.settings import settings_for_script

    knobs, notes = settings_for_script(settings, script) if settings is not None else ({}, [])
    for note in notes:
        typer.echo(f"paceline: {printable(note)}", err=True)
    kind = KNOBS["exchange"].value
    if exchange is not None:
        if kind is None or not kind.fits(exchange):
            raise ValueError(f"--exchange {exchange}: HINT: {kind}")
        knobs["exchange"] = exchange
    return knobs


def can_be_written(path: Path, option: str) -> None:
    """Check that a file can be written, before work that takes minutes.

    Raises:
        ValueError: The path is a folder, or its folder does not exist.
    """
    why = "it is a folder" if path.is_dir() else ""
    why = why or ("" if path.parent.is_dir() else f"{path.parent} is no folder")
    if why:
        raise ValueError(
            f"{option} {path} can't be written: {why}. HINT: a file in a folder that exists"
        )


def tuning_of(
    file: Path | None, compression: bool, script: str, knobs: dict[str, Any]
) -> "Tuning | None":
    """Return the options of --tune-exchange, and add the knobs that it needs to ``knobs``.

    Raises:
        ValueError: The options or the knobs contradict --tune-exchange, or the file exists and is
            not from --tune-exchange.
    """
    if file is None:
        if compression:
            raise ValueError(
                "--tune-compression: nothing is tuned. HINT: with --tune-exchange FILE"
            )
        return None
    from ...knobs.registry import LESS
    from ...knobs.settings import read
    from ...knobs.tuning import Tuning, made

    for name in ("bucket-mb", "algorithm", *LESS):
        if name in knobs:
            raise ValueError(f"--tune-exchange looks for {name}, and it is set. HINT: take one out")
    can_be_written(file, "--tune-exchange")
    if file.exists():
        made(file, read(file))
    gloo = "exchange" not in knobs  # untuned all-reduces use gloo, as without this option
    knobs.setdefault("exchange", "paceline")
    return Tuning(str(file.absolute()), Path(script).name, gloo, compression)
