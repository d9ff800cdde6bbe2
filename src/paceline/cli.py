"""The command line: one function a command; parse, call, print."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from .launch.here import InServer
from .launch.job import Job
from .launch.local import serve

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Scale a PyTorch training script, and see where every second of every rank goes.",
)


@contextlib.contextmanager
def _mistakes_told() -> Iterator[None]:
    """The user's mistakes in a line, and exit code 2."""
    try:
        yield
    except ValueError as mistake:
        typer.echo(f"paceline: {mistake}", err=True)
        raise typer.Exit(2) from None


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
    "paceline run -n 4 --max-restarts 3 train.py   ·   "
    "paceline run -H host1:4,host2:4 train.py   ·   "
    "salloc -N 2 paceline run train.py",
)
def run(
    script: Annotated[str, typer.Argument(help="The script (or with -m the module) to run.")],
    args: Annotated[
        list[str] | None, typer.Argument(help="What stands after the script is the script's.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--ranks",
            help="Ranks to start, in all. Default: on each host its GPUs; else the scheduler's "
            "tasks; else its NUMA domains.",
            show_default=False,
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            "-H",
            "--hosts",
            help="Hosts and their slots, as host1:4,host2:4; reached over ssh.",
            show_default=False,
        ),
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(
            help="The hosts from a file: one a line, as host1, host1:4 or host1 slots=4.",
            show_default=False,
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            help="A variable that all ranks get, as NAME or NAME=VALUE. Repeatable. (Over ssh, "
            "PATH, VIRTUAL_ENV, OMP_*, NCCL_* and the like travel by themselves.)",
            show_default=False,
        ),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            help="What starts an agent on each host: ssh, srun, jsrun, blaunch, palsrun, flux, "
            "mpirun or mpiexec. Default: the allocation's own, or ssh.",
            show_default=False,
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print what would start where, and start nothing.")
    ] = False,
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
    """Run SCRIPT on several ranks: of this machine, of named hosts, or of the whole allocation.

    Inside an allocation (Slurm, LSF, PBS, Flux, Cobalt) all of its hosts are used; -H and
    --hostfile name hosts by hand. Ranks get torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR ...), so a script written for torchrun runs unchanged. Lines that all ranks print
    are shown once, others carry their rank. If a rank fails, the others end within seconds, and
    the exit code is that rank's.
    """
    from .launch.start import start

    job = Job(
        name=script,
        args=args or [],
        module=module,
        max_restarts=max_restarts,
        fresh=fresh,
        threads=threads,
        bind=bind,
        port=port,
        summary=json,
        record=record,
    )
    try:
        code = start(job, ranks, hosts, hostfile, launcher, env or [], show)
    except ValueError as mistake:
        typer.echo(f"paceline: {mistake}", err=True)
        code = 2
    except KeyboardInterrupt:
        typer.echo("paceline: interrupted", err=True)
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

    with _mistakes_told():
        record_here(folder, {"name": script, "args": args or [], "module": module})


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

    with _mistakes_told():
        typer.echo(told(folders, steps, json), nl=False)


_SUBMIT_EPILOG = (
    "Examples:  paceline submit --hosts 2 --gpus-per-host 4 --time 2h train.py --epochs 10   ·   "
    "paceline submit --dry-run --scheduler pbs --ranks-per-host 4 --cpus-per-rank 7 train.py   ·   "
    "paceline submit --array 0-15%4 --time 90min --setup 'module load cuda' -m package.study"
)


@app.command(context_settings={"allow_interspersed_args": False}, epilog=_SUBMIT_EPILOG)
def submit(
    script: Annotated[str, typer.Argument(help="The script (or with -m the module) to run.")],
    args: Annotated[
        list[str] | None, typer.Argument(help="What stands after the script is the script's.")
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            help="slurm, lsf, pbs (PBS Pro) or torque. Default: whose command is on PATH.",
            show_default=False,
        ),
    ] = None,
    hosts: Annotated[int, typer.Option(help="Hosts to ask for.")] = 1,
    ranks_per_host: Annotated[
        int | None,
        typer.Option(help="Default: one a GPU; without GPUs, one.", show_default=False),
    ] = None,
    cpus_per_rank: Annotated[
        int | None, typer.Option(help="Cores for each rank.", show_default=False)
    ] = None,
    gpus_per_host: Annotated[
        int | None, typer.Option(help="GPUs of each host.", show_default=False)
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Of each host, as 64G.", show_default=False)
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(help="The limit: 2:00:00, 90min, 2h, 1-12:00:00.", show_default=False),
    ] = None,
    queue: Annotated[
        str | None, typer.Option("--queue", "--partition", help="Where to.", show_default=False)
    ] = None,
    account: Annotated[
        str | None, typer.Option(help="Account or project to charge.", show_default=False)
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Default: the script's name.", show_default=False)
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            help="File for what the job prints, in the scheduler's own words (Slurm: %j, %A_%a; "
            "LSF: %J, %I). Default: the job's name and number, in this folder.",
            show_default=False,
        ),
    ] = None,
    array: Annotated[
        str | None,
        typer.Option(
            help="The job once for each number, as 0-15 or 0-15%4 (4 at once); the script finds "
            "its own in PACELINE_TRIAL.",
            show_default=False,
        ),
    ] = None,
    warn: Annotated[
        int | None,
        typer.Option(
            help="So many seconds before the limit the scheduler sends SIGUSR1, which paceline "
            "run passes on to the ranks (Slurm; LSF in whole minutes; PBS can't). 0: no signal. "
            "Default: 120 where --time is 10 minutes or more.",
            show_default=False,
        ),
    ] = None,
    requeue: Annotated[
        bool,
        typer.Option("--requeue", help="Put it back in the queue where its hosts fail or go."),
    ] = False,
    setup: Annotated[
        list[str] | None,
        typer.Option(help="A line of shell before the run; as often as needed."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option of the scheduler's own, as it is; as often as needed."),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module's name, as in python -m.")
    ] = False,
    max_restarts: Annotated[int, typer.Option(help="See paceline run.", min=0)] = 0,
    record: Annotated[
        Path | None,
        typer.Option(
            help="See paceline run; of an array each job has a folder of its own in this one.",
            show_default=False,
        ),
    ] = None,
    run_option: Annotated[
        list[str] | None,
        typer.Option(help="Any other of paceline run, as --run-option=--bind=core."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch script and submit nothing.")
    ] = False,
) -> None:
    """Write the batch script of SCRIPT's run, and submit it to Slurm, LSF, PBS Pro or Torque.

    Prints the job's number on stdout, and where its output goes on stderr. The script changes to
    this folder, activates this Python environment, and becomes paceline run (exec), so that the
    scheduler's signals reach it.

    Run for real: Slurm, and Torque's words through the qsub that Slurm has. Only modelled after
    their documents: LSF, PBS Pro and Torque's own server; look at --dry-run the first time.
    """
    from .launch.submit import batch as said
    from .launch.submit import command

    with _mistakes_told():
        kind = command.scheduler(scheduler)
        limit = None if time is None else said.seconds(time)
        batch = said.Batch(
            name=said.job_name(name, script),
            want=said.Resources(
                hosts=hosts,
                ranks=ranks_per_host,
                cpus=cpus_per_rank,
                gpus=gpus_per_host,
                memory=None if memory is None else said.memory(memory),
                seconds=limit,
            ),
            queue=queue,
            account=account,
            output=output,
            array=None if array is None else said.array(array),
            warn=warn if warn is not None else said.usual_warning(limit),
            requeue=requeue,
            options=option or [],
        )
        job = Job(
            name=script,
            args=args or [],
            module=module,
            max_restarts=max_restarts,
            record=None if dry_run else record,  # looked at only where the job is meant
        )
        text = command.written(kind, batch, setup or [], job, record, run_option or [])
        if kind.no_warning and warn:
            typer.echo(f"paceline: --warn {warn}: {kind.no_warning}", err=True)
        if dry_run:
            typer.echo(text, nl=False)
            return
        number = command.sent(kind, batch, text)
    typer.echo(number)
    where = kind.output(batch, number)
    typer.echo(f"paceline: {kind.title} has it as job {number}; output: {where}", err=True)


def main() -> None:
    """The ``paceline`` command."""
    try:
        app()
    except InServer as forked:
        job = forked
    serve(job)  # not in the handler: a rank's exceptions have no context of ours
