"""Queries to the scheduler for jobs that stop early: the end of the time limit, and requeuing.

Only Slurm supports these queries.
"""

import os
import re
import subprocess
import sys
import time

from ..cluster.schedulers import allocation
from ..cluster.schedulers.env_numbers import Environment
from ..security.processes import run_program

STOPPED_EARLY_EXIT_CODE = 75  # of ranks that stopped early (world.early_exit); EX_TEMPFAIL
QUERY_TIMEOUT_S = 10.0


def end_time() -> str | None:
    """Return when the scheduler ends this job, as the value of PACELINE_END_TIME for the ranks.

    The value is in seconds since 1970. None if there is no time limit or it is unknown.
    """
    answer = allocation.end_time(os.environ)
    if answer is not None:
        return str(answer)
    left = _seconds_left(os.environ)
    return None if left is None else f"{time.time() + left:.0f}"


def _seconds_left(environment: Environment) -> float | None:
    """Return the seconds until Slurm's time limit, or None.

    Slurm sets an environment variable for this only since version 23.02. The query runs once, at
    the start.
    """
    job = environment.get("SLURM_JOB_ID")
    answer = _run_slurm("squeue", "-h", "-o", "%L", "-j", job) if job else None
    text = answer.stdout.strip() if answer is not None else ""
    clock = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if clock is None:  # UNLIMITED, or the job no longer exists
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def requeue() -> None:
    """Requeue this job if that was requested (``paceline submit --requeue``).

    Must not be called after SIGTERM: while Slurm ends a job, Paceline can't find out whether the
    user has cancelled it, and a cancelled job must not be requeued. Slurm requeues preempted jobs
    automatically.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    if os.environ.get("PACELINE_REQUEUE") != "1":
        if os.environ.get("ENVIRONMENT") != "BATCH":
            return  # salloc: there is no batch job to requeue
        sys.stderr.write(
            f"paceline: job {job} is not requeued. HINT: paceline submit --requeue, "
            f"or PACELINE_REQUEUE=1 in the batch script, or: scontrol requeue {job}\n"
        )
        return
    sys.stderr.write(f"paceline: job {job} is requeued (scontrol requeue)\n")
    sys.stderr.flush()  # before Slurm ends this script to requeue it
    answer = _run_slurm("scontrol", "requeue", job)
    if answer is None or answer.returncode:
        why = answer.stderr.strip() if answer is not None else "no answer"
        sys.stderr.write(f"paceline: scontrol requeue failed: {why}. HINT: submit the job again\n")


def _run_slurm(*command: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return run_program(*command, seconds=QUERY_TIMEOUT_S)
    except OSError:
        return None
