"""Options of ``paceline scale --submit``, and the jobs of a study."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .base import say
from .options import flag, value_option

if TYPE_CHECKING:
    from ...analyze.scaling.study_model import StudyRequest
    from ...study.scale.jobs import JobOptions

JOBS = "Jobs of a scheduler"


@dataclass(frozen=True)
class JobsOptions:
    """The options of a study's jobs, as typed."""

    submit: Annotated[
        bool,
        flag(
            "--submit",
            "Submit one job for each size, and return. --continue then prints what the jobs "
            "have measured, and submits those again that failed. --minutes is the time of each "
            "job.",
            panel=JOBS,
        ),
    ] = False
    dry_run: Annotated[
        bool,
        flag(
            "--dry-run",
            "With --submit: print the cost and the batch scripts, and submit nothing.",
            panel=JOBS,
        ),
    ] = False
    node_hours: Annotated[
        float | None,
        value_option(
            "Limit of the node-hours of all jobs together.", "HOURS", min=0.001, panel=JOBS
        ),
    ] = None
    ranks_per_node: Annotated[
        int | None,
        value_option(
            "Ranks on a full node. Default: one for each GPU; one without GPUs.",
            "N",
            min=1,
            panel=JOBS,
        ),
    ] = None
    gpus_per_node: Annotated[
        int | None, value_option("Number of GPUs on each node.", "N", min=1, panel=JOBS)
    ] = None
    memory: Annotated[str | None, value_option("Memory of each node: 64G.", "SIZE", panel=JOBS)] = (
        None
    )
    queue: Annotated[
        str | None,
        value_option("Queue or partition.", "NAME", "--queue", "--partition", panel=JOBS),
    ] = None
    account: Annotated[
        str | None, value_option("Account or project to charge.", "NAME", panel=JOBS)
    ] = None
    scheduler: Annotated[
        str | None,
        value_option(
            "slurm, lsf, pbs (PBS Pro) or torque. Default: the one whose command is in PATH.",
            "NAME",
            panel=JOBS,
        ),
    ] = None
    setup: Annotated[
        list[str] | None,
        value_option(
            "Shell command to run before the study in each job: 'module load cuda'. May be "
            "repeated.",
            "LINE",
            panel=JOBS,
        ),
    ] = None
    option: Annotated[
        list[str] | None,
        value_option(
            "Option of the scheduler, passed on unchanged: --option=--constraint=gpu. May be "
            "repeated.",
            "OPTION",
            panel=JOBS,
        ),
    ] = None
    only: Annotated[  # in the jobs that --submit starts
        int | None, typer.Option("--only", hidden=True, min=1, metavar="N")
    ] = None

    def checked(self, cpus: int | None) -> "JobOptions":
        """Return the options of the jobs. Raises ValueError: one is not valid.

        Args:
            cpus: Cores of each rank.
        """
        from ...launch.submit import batch_options
        from ...study.scale.jobs import JobOptions, scheduler_name

        return JobOptions(
            scheduler_name(self.scheduler),
            self.ranks_per_node or self.gpus_per_node or 1,
            cpus,
            self.gpus_per_node,
            None if self.memory is None else batch_options.memory(self.memory),
            self.queue,
            self.account,
            self.setup or [],
            self.option or [],
            self.node_hours,
        )


# Parameters of the command that need --submit, and those that a study in jobs does not take.
OF_JOBS = tuple(given.name for given in fields(JobsOptions) if given.name not in ("submit", "only"))
NOT_IN_JOBS = ("hosts", "hostfile", "beside")


def check_given(given: dict[str, str]) -> None:
    """Raise ValueError for parameters that a new study, in jobs or not, does not take."""
    if "only" in given:
        raise ValueError("--only is for the jobs of --submit. HINT: leave it out")
    wrong = [given[name] for name in OF_JOBS if name in given]
    if wrong and "submit" not in given:
        raise ValueError(f"{wrong[0]} is for jobs of a scheduler. HINT: --submit, or leave it out")
    wrong = [given[name] for name in NOT_IN_JOBS if name in given]
    if wrong and "submit" in given:
        raise ValueError(
            f"--submit: the scheduler places the ranks of each size, and {wrong[0]} is given too. "
            "HINT: leave it out"
        )


def submit_study(
    request: "StudyRequest", folder: Path, options: "JobOptions", dry_run: bool
) -> None:
    """Start a study in jobs of a scheduler, or print what would be submitted.

    Raises:
        ValueError: The request needs a run first, the jobs cost too much, or the scheduler does
            not accept them.
        OSError: The folder can't be written.
    """
    from ...study.scale.jobs import begin_jobs, check_node_hours, plan_jobs, show_jobs
    from ...study.scale.run_study import new_study, plan_study

    if request.global_batch is None:
        raise ValueError(
            "--submit needs --global-batch: the jobs of all sizes are submitted before the script "
            "has run. HINT: --global-batch N, the batch of all ranks at the smallest size"
        )
    request = replace(request, ranks_per_host=options.ranks_per_node)
    study = plan_study(request)
    if dry_run:
        show_jobs(folder, study, options, typer.echo)
        return
    check_node_hours(options, plan_jobs(study, options, request.sizes))
    new_study(folder, request)
    say(f"the study is in {folder}")
    begin_jobs(folder, options, say)
    say(f"HINT: paceline scale --continue {folder} when the jobs have ended")


def gather_jobs(folder: Path, minutes: float | None, node_hours: float | None) -> None:
    """Say which jobs of a study wait or run, and submit those again that are missing.

    Args:
        folder: The study's folder.
        minutes, node_hours: Limits of each job and of all, from now on; None: as before.

    Raises ValueError, OSError.
    """
    from ...study.scale.jobs import continue_jobs

    if continue_jobs(folder, say, minutes, node_hours):
        say(f"HINT: paceline scale --continue {folder} when the jobs have ended")
