"""``paceline scale --submit``: one job of the scheduler for each size.

Each job runs ``paceline scale --continue DIR --only N`` in its allocation, and writes into the
study's folder. ``jobs.json`` there has the options of the jobs and the jobs that were submitted.
"""

import json
import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from ...analyze.scaling.study_folder import (
    StoredFile,
    StoredStudy,
    read_runs,
    read_stored,
    write_study,
)
from ...analyze.scaling.study_model import MIN_REPEATS, Amount, Ranks, Seconds, StudyRun
from ...launch.submit.batch_options import Batch, Resources, clock, job_name, usual_warning
from ...launch.submit.schedulers import SCHEDULERS
from ...launch.submit.submit import command_script, is_active, scheduler, submit_script
from ...plurals import counted
from ...security.files import InvalidFileError
from ...security.folders import replace_file
from ...security.schema import Count, Size, read_json
from ...security.text import printable
from ..script_runs.run_process import last_lines
from ..study_folder import locked_sizes
from .plan import DEFAULT_MINUTES, setups_of

FORMAT, VERSION = "paceline-scaling-jobs", 1
JOBS_FILE, OUTPUT_FOLDER = "jobs.json", "jobs"
MAX_JOBS_BYTES = 4 << 20
START_MARGIN_S = 180  # of a job, for the start of its first run and the end of its last one
HOUR_S = 3600


@dataclass(frozen=True)
class JobOptions:
    """Options of all jobs of a study.

    Attributes:
        scheduler: Name of the scheduler.
        ranks_per_node: Ranks on a node, of sizes that need a whole one.
        cpus, gpus_per_node, memory, queue, account, options: As in ``paceline submit``.
        setup: Shell commands that run before the study in a job.
        node_hours: Limit of all jobs together, also of those that ended; None: no limit.
    """

    scheduler: str
    ranks_per_node: Size = 1
    cpus: Size | None = None
    gpus_per_node: Size | None = None
    memory: str | None = None
    queue: str | None = None
    account: str | None = None
    setup: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    node_hours: Amount | None = None


@dataclass(frozen=True)
class SizeJob:
    """One job.

    Attributes:
        number: Number that the scheduler gave it; "" before it is submitted.
        ranks: The size that it measures.
        hosts: Number of nodes.
        seconds: Its time limit.
        submitted: When (s since 1970).
        output: File of its output, relative to the study's folder.
    """

    ranks: Ranks
    hosts: Size
    seconds: Count
    number: Annotated[str, Meta(max_length=200)] = ""
    submitted: Seconds = 0.0
    output: Annotated[str, Meta(max_length=200)] = ""

    @property
    def node_hours(self) -> float:
        return self.hosts * self.seconds / HOUR_S


@dataclass(frozen=True)
class StoredJobs(StoredFile):
    """Contents of ``jobs.json``."""

    options: JobOptions
    jobs: list[SizeJob] = field(default_factory=list)


def has_jobs(folder: Path) -> bool:
    """Return whether a study is measured in jobs."""
    return (folder / JOBS_FILE).exists()


def read_jobs(folder: Path) -> StoredJobs:
    """Read ``jobs.json``. Raises ValueError, OSError."""
    path = folder / JOBS_FILE
    stored = read_json(path, StoredJobs, MAX_JOBS_BYTES, escape=False)
    stored.check(path, FORMAT, VERSION)
    if stored.options.scheduler not in SCHEDULERS:
        raise InvalidFileError(path, f"names no scheduler: {stored.options.scheduler[:40]!r}")
    return stored


def _write(folder: Path, jobs: StoredJobs) -> None:
    replace_file(folder / JOBS_FILE, json.dumps(asdict(jobs)).encode() + b"\n")


def plan_jobs(stored: StoredStudy, options: JobOptions, sizes: Sequence[int]) -> list[SizeJob]:
    """Return the jobs of sizes; the time limit of each is the study's ``--minutes``."""
    seconds = 60 * (stored.request.minutes or DEFAULT_MINUTES) + START_MARGIN_S
    return [
        SizeJob(size, -(-size // options.ranks_per_node), math.ceil(seconds / 60) * 60)
        for size in sizes
    ]


def cost_lines(stored: StoredStudy, jobs: Sequence[SizeJob], runs: Sequence[StudyRun]) -> list[str]:
    """Return the jobs and what they cost at most, one line each."""
    lines = []
    for job in jobs:
        setups = [setup for setup in setups_of(stored.points) if setup.ranks == job.ranks]
        batches = ", ".join(str(setup.global_batch) for setup in setups)
        known = [run.took_s for run in runs if run.setup.ranks == job.ranks]
        usual = f"; runs took {max(known):.0f} s each" if known else ""
        lines.append(
            f"{counted(job.ranks, 'rank')} on {counted(job.hosts, 'node')}, global batch "
            f"{batches}: at most {clock(job.seconds)}, {job.node_hours:.2f} node-hours{usual}"
        )
    total = sum(job.node_hours for job in jobs)
    lines.append(
        f"together at most {total:.2f} node-hours in {counted(len(jobs), 'job')}; a job ends as "
        "soon as its size is known"
    )
    return lines


def spent_node_hours(runs: Sequence[StudyRun]) -> float:
    """Return the node-hours of the runs that ended."""
    return sum(run.took_s * run.hosts for run in runs) / HOUR_S


def check_node_hours(
    options: JobOptions,
    jobs: Sequence[SizeJob],
    runs: Sequence[StudyRun] = (),
    active: Sequence[SizeJob] = (),
) -> None:
    """Raise ValueError if the jobs may cost more than ``--node-hours``.

    Args:
        options: Options of all jobs.
        jobs: Jobs that are to be submitted.
        runs: All runs that ended.
        active: Jobs that wait or run. They may use their whole time limit, runs that ended
            included.
    """
    if options.node_hours is None or not jobs:
        return
    began = {job.ranks: job.submitted for job in active}
    ended = [run for run in runs if run.started < began.get(run.setup.ranks, math.inf)]
    spent, planned = spent_node_hours(ended), sum(job.node_hours for job in jobs)
    held = sum(job.node_hours for job in active)
    if spent + held + planned <= options.node_hours:
        return
    hosts = sum(job.hosts for job in jobs)
    minutes = ((options.node_hours - spent - held) * HOUR_S / hosts - START_MARGIN_S) / 60 - 1
    before = f"; {spent:.2f} are spent" if spent else ""
    before += f"; jobs that wait or run may use {held:.2f}" if held else ""
    hint = f"--minutes {minutes:.0f} for each job, " if minutes >= 1 else ""
    least = math.ceil(100 * (spent + held + planned) - 1e-6) / 100
    raise ValueError(
        f"--node-hours {options.node_hours:g}: the jobs may need {planned:.2f} node-hours{before}. "
        f"HINT: {hint}--node-hours {least:g}, or a new study without the largest size"
    )


def batch_of(stored: StoredStudy, options: JobOptions, job: SizeJob, folder: Path) -> Batch:
    """Return the options of a job for the scheduler."""
    return Batch(
        name=job_name(None, stored.request.script) + f"-n{job.ranks}",
        want=Resources(
            hosts=job.hosts,
            ranks=min(job.ranks, options.ranks_per_node),
            cpus=options.cpus,
            gpus=options.gpus_per_node,
            memory=options.memory,
            seconds=job.seconds,
        ),
        queue=options.queue,
        account=options.account,
        output=str(folder / job.output),
        warn=usual_warning(job.seconds),
        options=options.options,
    )


def script_of(stored: StoredStudy, options: JobOptions, job: SizeJob, folder: Path) -> str:
    """Return the batch script of a job. Raises ValueError."""
    command = ["scale", "--continue", str(folder), "--only", str(job.ranks)]
    batch = batch_of(stored, options, job, folder)
    kind, words = SCHEDULERS[options.scheduler], shlex.join(command)
    return command_script(kind, batch, options.setup, words, makes_folder=True)


def show_jobs(
    folder: Path, stored: StoredStudy, options: JobOptions, say: Callable[[str], None]
) -> None:
    """Print what the jobs of a new study cost, and their batch scripts. Raises ValueError."""
    jobs = plan_jobs(stored, options, sorted(stored.request.sizes))
    for line in cost_lines(stored, jobs, []):
        say(line)
    check_node_hours(options, jobs)
    for job in jobs:
        job = replace(job, output=_output(job, 1))
        say(f"batch script of {counted(job.ranks, 'rank')}:")
        say(script_of(stored, options, job, folder.absolute()))


def begin_jobs(folder: Path, options: JobOptions, say: Callable[[str], None]) -> list[SizeJob]:
    """Submit a job for each size of a new study.

    Args:
        folder: The study's folder.
        options: Options of the jobs.
        say: Receives the cost before the jobs are submitted, and the jobs.

    Raises:
        ValueError: The jobs would cost too much, the scheduler did not accept one, or another
            command works on the study.
        OSError: The folder can't be written.
    """
    folder, stored = folder.absolute(), read_stored(folder)
    with locked_sizes(folder, say):
        jobs = StoredJobs(FORMAT, VERSION, options)
        _write(folder, jobs)
        return _submit(folder, stored, jobs, sorted(stored.request.sizes), [], say)


def continue_jobs(
    folder: Path,
    say: Callable[[str], None],
    minutes: float | None = None,
    node_hours: float | None = None,
) -> list[SizeJob]:
    """Submit a job for each size that has too few runs and no job that waits or runs.

    Args:
        folder: The study's folder.
        say: Receives which jobs wait or run, and those that are submitted.
        minutes: Time budget of each job from now on, instead of that of the request.
        node_hours: Limit from now on; None: as before.

    Returns:
        The jobs that wait or run now.

    Raises:
        ValueError: A job's state is not known, or as for ``begin_jobs``.
    """
    read_stored(folder)  # before the lock: it may be no study
    with locked_sizes(folder, say):
        if minutes is not None:
            stored = read_stored(folder)
            write_study(folder, replace(stored, request=replace(stored.request, minutes=minutes)))
        if node_hours is not None:
            jobs = read_jobs(folder)
            _write(folder, replace(jobs, options=replace(jobs.options, node_hours=node_hours)))
        return _continue_jobs(folder.absolute(), say)


def _continue_jobs(folder: Path, say: Callable[[str], None]) -> list[SizeJob]:
    stored, jobs = read_stored(folder), read_jobs(folder)
    kind, missing, active = SCHEDULERS[jobs.options.scheduler], list[int](), list[SizeJob]()
    runs = read_runs(folder)[0]
    for size in sorted(stored.request.sizes):
        last = next((job for job in reversed(jobs.jobs) if job.ranks == size), None)
        if last is not None and is_active(kind, last.number):
            active.append(last)
            say(f"{counted(size, 'rank')}: job {last.number} waits or runs")
        elif _lacks_runs(stored, size, runs):
            missing.append(size)
            if last is not None:
                say(_ended_early(folder, last))
    return [*active, *_submit(folder, stored, jobs, missing, active, say)]


def _lacks_runs(stored: StoredStudy, size: int, runs: Sequence[StudyRun]) -> bool:
    """Return whether a setup of a size has too few runs, and none that failed."""
    for setup in setups_of(stored.points):
        mine = [run for run in runs if run.setup == setup]
        failed = any(run.figures is None for run in mine)
        if setup.ranks == size and not failed and len(mine) < MIN_REPEATS:
            return True
    return False


def _ended_early(folder: Path, job: SizeJob) -> str:
    """Return what is known of a job that ended before its size had enough runs."""
    text = f"{counted(job.ranks, 'rank')}: job {job.number} ended before the size was measured"
    try:
        words = "".join(f"\n    {line}" for line in last_lines(folder / job.output))
    except OSError:
        words = ""
    return printable(text + words, lines=True)


def _submit(
    folder: Path,
    stored: StoredStudy,
    jobs: StoredJobs,
    sizes: Sequence[int],
    active: Sequence[SizeJob],
    say: Callable[[str], None],
) -> list[SizeJob]:
    """Submit the jobs of sizes, and store each before the next one is submitted.

    active: Jobs that wait or run.
    """
    runs = read_runs(folder)[0]
    planned = plan_jobs(stored, jobs.options, sizes)
    if planned:
        for line in cost_lines(stored, planned, runs):
            say(line)
    check_node_hours(jobs.options, planned, runs, active)
    (folder / OUTPUT_FOLDER).mkdir(exist_ok=True)
    kind, submitted = SCHEDULERS[jobs.options.scheduler], []
    for job in planned:
        before = sum(earlier.ranks == job.ranks for earlier in jobs.jobs)
        job = replace(job, output=_output(job, before + 1))
        script = script_of(stored, jobs.options, job, folder)
        number = submit_script(kind, batch_of(stored, jobs.options, job, folder), script)
        job = replace(job, number=number, submitted=time.time())
        jobs = replace(jobs, jobs=[*jobs.jobs, job])
        _write(folder, jobs)
        submitted.append(job)
        say(f"{counted(job.ranks, 'rank')}: submitted to {kind.title} as job {number}")
    return submitted


def _output(job: SizeJob, attempt: int) -> str:
    return f"{OUTPUT_FOLDER}/n{job.ranks}-{attempt}.out"


def scheduler_name(given: str | None) -> str:
    """Return the name of the scheduler: as given, or that whose command is on PATH.

    Raises:
        ValueError: The name is unknown, or no scheduler or several are found.
    """
    found = scheduler(given)
    return next(name for name, one in SCHEDULERS.items() if one is found)
