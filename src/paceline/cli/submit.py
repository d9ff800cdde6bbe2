"""The command ``paceline submit``."""

from pathlib import Path
from typing import Annotated

import typer

from ..launch.job import Job
from .common.base import app, exit_on_mistake
from .common.options import Args, Script
from .common.script_options import ScriptCommand

_SUBMIT_EPILOG = (
    "Examples:  paceline submit --hosts 2 --gpus-per-host 4 --time 2h train.py --epochs 10   ·   "
    "paceline submit --dry-run --scheduler pbs --ranks-per-host 4 --cpus-per-rank 7 train.py   ·   "
    "paceline submit --array 0-15%4 --time 90min --setup 'module load cuda' -m package.study"
)


@app.command(
    cls=ScriptCommand,
    context_settings={"allow_interspersed_args": False},
    epilog=_SUBMIT_EPILOG,
)
def submit(
    script: Script,
    args: Args = None,
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
    switches: Annotated[
        str | None,
        typer.Option(
            help="Maximum number of leaf switches over which the hosts are spread, as 1, or as "
            "1@30min: after 30 minutes in the queue more are accepted. Slurm: --switches; LSF: "
            "compute units (cu[maxcus=N]); PBS Pro: 1 only (place=group=switch).",
            metavar="N[@TIME]",
            show_default=False,
        ),
    ] = None,
    warn: Annotated[
        int | None,
        typer.Option(
            help="So many seconds before the limit the scheduler sends SIGUSR1, which paceline "
            "run passes on to the ranks (Slurm; LSF in whole minutes; PBS can't): world.epochs "
            "then writes a checkpoint and leaves (exit code 75). 0: no signal. "
            "Default: 120 where --time is 10 minutes or more.",
            show_default=False,
        ),
    ] = None,
    requeue: Annotated[
        bool,
        typer.Option(
            "--requeue",
            help="Put it back in the queue where its hosts fail or go, and (Slurm, LSF) where it "
            "has left early with a checkpoint, until it is done.",
        ),
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
    min_hosts: Annotated[
        int | None,
        typer.Option(
            help="See paceline run. The scheduler is asked to leave the job its other hosts when "
            "it loses one (Slurm, PBS Pro).",
            show_default=False,
        ),
    ] = None,
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
    from ..launch.submit import batch_options as said
    from ..launch.submit import submit as command

    with exit_on_mistake():
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
            switches=None if switches is None else said.switches(switches),
            warn=warn if warn is not None else said.usual_warning(limit),
            requeue=requeue,
            goes_on=min_hosts is not None and min_hosts < hosts,
            options=option or [],
        )
        job = Job(
            name=script,
            args=args or [],
            module=module,
            max_restarts=max_restarts,
            min_hosts=min_hosts,
            record=None if dry_run else record,  # validated only if the job is submitted
        )
        text = command.batch_script(kind, batch, setup or [], job, record, run_option or [])
        if kind.no_warning and warn:
            typer.echo(f"paceline: --warn {warn}: {kind.no_warning}", err=True)
        if dry_run:
            typer.echo(text, nl=False)
            return
        number = command.submit_script(kind, batch, text)
    typer.echo(number)
    where = kind.output(batch, number)
    typer.echo(f"paceline: {kind.title} has it as job {number}; output: {where}", err=True)
