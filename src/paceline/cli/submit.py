"""The command ``paceline submit``."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from ..launch.job import Job
from .common.base import RUN, app, examples, exit_on_mistake, say
from .common.command import refuse_script, with_options
from .common.options import Args, Module, Script, flag, value_option
from .common.script_options import ScriptCommand

if TYPE_CHECKING:
    from ..launch.submit.batch_options import Batch

RESOURCES = "Resources"
SCHEDULER = "Scheduler"
TRAINING = "Options of paceline run"


class SubmitCommand(ScriptCommand):
    """``paceline submit``, with the earlier names of its options."""

    renamed: ClassVar[dict[str, str]] = {
        "--hosts": "--nodes",
        "--ranks-per-host": "--ranks-per-node",
        "--gpus-per-host": "--gpus-per-node",
    }


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """The options of ``paceline submit``, as typed."""

    script: Script
    args: Args = None
    nodes: Annotated[int, value_option("Number of nodes.", "N", show_default=True)] = 1
    gpus_per_node: Annotated[int | None, value_option("Number of GPUs on each node.", "N")] = None
    time: Annotated[
        str | None,
        value_option(
            "Time limit: 2:00:00, 90min, 2h, 1-12:00:00. Default: that of the queue.", "TIME"
        ),
    ] = None
    queue: Annotated[
        str | None, value_option("Queue or partition.", "NAME", "--queue", "--partition")
    ] = None
    account: Annotated[str | None, value_option("Account or project to charge.", "NAME")] = None
    requeue: Annotated[
        bool,
        flag(
            "--requeue",
            "Requeue the job until the script completes: after a lost node, and (Slurm, LSF) "
            "after exit code 75 (time limit, checkpoint written).",
        ),
    ] = False
    module: Module = False
    dry_run: Annotated[bool, flag("--dry-run", "Print the batch script, and submit nothing.")] = (
        False
    )
    ranks_per_node: Annotated[
        int | None,
        value_option(
            "Number of ranks on each node. Default: one for each GPU; one without GPUs.",
            "N",
            panel=RESOURCES,
        ),
    ] = None
    cpus_per_rank: Annotated[
        int | None, value_option("Cores of each rank.", "N", panel=RESOURCES)
    ] = None
    memory: Annotated[
        str | None, value_option("Memory of each node: 64G.", "SIZE", panel=RESOURCES)
    ] = None
    switches: Annotated[
        str | None,
        value_option(
            "Maximum number of leaf switches over which the nodes are spread. 1@30min: after "
            "30 minutes in the queue more are accepted. Slurm: --switches; LSF: compute units "
            "(cu[maxcus=N]); PBS Pro: 1 only (place=group=switch).",
            "N[@TIME]",
            panel=RESOURCES,
        ),
    ] = None
    scheduler: Annotated[
        str | None,
        value_option(
            "slurm, lsf, pbs (PBS Pro) or torque. Default: the one whose command is in PATH.",
            "NAME",
            panel=SCHEDULER,
        ),
    ] = None
    name: Annotated[
        str | None,
        value_option("Name of the job. Default: that of the script.", "NAME", panel=SCHEDULER),
    ] = None
    output: Annotated[
        str | None,
        value_option(
            "File for the output of the job, with the scheduler's placeholders (Slurm: %j, "
            "%A_%a; LSF: %J, %I). Default: name and number of the job, in the "
            "working directory.",
            "FILE",
            panel=SCHEDULER,
        ),
    ] = None
    array: Annotated[
        str | None,
        value_option(
            "Submit a job array: 0-15, or 0-15%4 for at most 4 at once. The script reads its "
            "number from the environment variable PACELINE_TRIAL.",
            "RANGE",
            panel=SCHEDULER,
        ),
    ] = None
    warn: Annotated[
        int | None,
        value_option(
            "Seconds before the time limit at which the scheduler sends SIGUSR1 (Slurm; LSF "
            "in minutes; not PBS), so that world.epochs writes a checkpoint and the job ends with "
            "exit code 75. 0: no signal. Default: 120 if --time is at least 10 minutes.",
            "SECONDS",
            panel=SCHEDULER,
        ),
    ] = None
    setup: Annotated[
        list[str] | None,
        value_option(
            "Shell command to run before the ranks start: 'module load cuda'. May be repeated.",
            "LINE",
            panel=SCHEDULER,
        ),
    ] = None
    option: Annotated[
        list[str] | None,
        value_option(
            "Option of the scheduler, passed on unchanged: --option=--constraint=gpu. May be "
            "repeated.",
            "OPTION",
            panel=SCHEDULER,
        ),
    ] = None
    max_restarts: Annotated[
        int,
        value_option(
            "Number of restarts after failures, within the job.",
            "N",
            panel=TRAINING,
            min=0,
            show_default=True,
        ),
    ] = 0
    min_hosts: Annotated[
        int | None,
        value_option(
            "With --max-restarts: continue without lost nodes, if at least this many remain. "
            "The batch script asks the scheduler to keep the job after the loss of a node (Slurm, "
            "PBS Pro).",
            "N",
            panel=TRAINING,
        ),
    ] = None
    record: Annotated[
        Path | None,
        value_option(
            "Record what every rank does into this folder. Each job of an array gets a "
            "separate subfolder.",
            "DIR",
            panel=TRAINING,
        ),
    ] = None
    run_option: Annotated[
        list[str] | None,
        value_option(
            "Any other option of paceline run: --run-option=--bind=core. May be repeated.",
            "OPTION",
            panel=TRAINING,
        ),
    ] = None

    def batch(self) -> "Batch":
        """Return the job for the scheduler. Raises ValueError for an option that is not valid."""
        from ..launch.submit import batch_options as parse

        limit = None if self.time is None else parse.seconds(self.time)
        min_hosts = self.min_hosts
        return parse.Batch(
            name=parse.job_name(self.name, self.script),
            want=parse.Resources(
                hosts=self.nodes,
                ranks=self.ranks_per_node,
                cpus=self.cpus_per_rank,
                gpus=self.gpus_per_node,
                memory=None if self.memory is None else parse.memory(self.memory),
                seconds=limit,
            ),
            queue=self.queue,
            account=self.account,
            output=self.output,
            array=None if self.array is None else parse.array(self.array),
            switches=None if self.switches is None else parse.switches(self.switches),
            warn=self.warn if self.warn is not None else parse.usual_warning(limit),
            requeue=self.requeue,
            goes_on=min_hosts is not None and min_hosts < self.nodes,
            options=self.option or [],
        )


@app.command(
    cls=SubmitCommand,
    rich_help_panel=RUN,
    short_help="Write a batch script for Slurm, LSF or PBS, and submit it",
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        ("paceline submit --nodes 2 --gpus-per-node 4 --time 2h train.py", "submit"),
        ("paceline submit --dry-run --nodes 2 --time 2h train.py", "print the batch script"),
        ("paceline submit --requeue --time 2h train.py", "continue after the time limit"),
        ("paceline submit --array 0-15%4 --time 90min -m package.study", "16 jobs, 4 at once"),
    ),
)
@with_options
def submit(options: SubmitOptions) -> None:
    """Write a batch script that runs SCRIPT, and submit it to Slurm, LSF, PBS Pro or Torque.

    The command prints the job ID on standard output, and the name of the output file on standard
    error. The batch script changes to the current working directory, activates the current Python
    environment, and starts paceline run with exec, so that it gets the signals of the scheduler.

    Slurm is tested with a real server, Torque with the qsub of Slurm. LSF, PBS Pro and the server
    of Torque are modelled after their documentation: check the output of --dry-run first.
    """
    from ..launch.submit import submit as command

    with exit_on_mistake():
        if options.output is not None:
            refuse_script(Path(options.output), "--output")
        kind = command.scheduler(options.scheduler)
        batch = options.batch()
        job = Job(
            name=options.script,
            args=options.args or [],
            module=options.module,
            max_restarts=options.max_restarts,
            min_hosts=options.min_hosts,
            # validated only if the job is submitted
            record=None if options.dry_run else options.record,
        )
        setup, run_options = options.setup or [], options.run_option or []
        text = command.batch_script(kind, batch, setup, job, options.record, run_options)
        if kind.no_warning and options.warn:
            say(f"--warn {options.warn}: {kind.no_warning}")
        if options.dry_run:
            typer.echo(text, nl=False)
            return
        number = command.submit_script(kind, batch, text)
    typer.echo(number)
    where = kind.output(batch, number)
    say(f"submitted to {kind.title} as job {number}; output: {where}")
