"""What a job that has left early needs of its scheduler: when its time ends, and to be queued
again. Only Slurm can be asked."""

import os
import re
import subprocess
import sys
import time

from ..cluster.schedulers import time_limit
from ..cluster.schedulers.env_numbers import Environment

STOPPED_EARLY_EXIT_CODE = (
    75  # the exit code of ranks that have left early (world.early); EX_TEMPFAIL
)
QUERY_TIMEOUT_S = 10.0


def end_time() -> str | None:
    """When the scheduler ends this job, as PACELINE_END_TIME tells it to the ranks."""
    answer = time_limit.end_time(os.environ)
    if answer is not None:
        return str(answer)
    left = _seconds_left(os.environ)
    return None if left is None else f"{time.time() + left:.0f}"


def _seconds_left(environment: Environment) -> float | None:
    """Slurm has the variable from 23.02 on; asked once, at the start."""
    job = environment.get("SLURM_JOB_ID")
    answer = _run_slurm("squeue", "-h", "-o", "%L", "-j", job) if job else None
    said = answer.stdout.strip() if answer is not None else ""
    clock = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", said)
    if clock is None:  # UNLIMITED, or a job of long ago
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def requeue() -> None:
    """Put this job back in its queue, where that was asked for (paceline submit --requeue).

    Not after SIGTERM: while Slurm ends a job it does not let us know whether it was cancelled,
    which is the user's wish; one that was preempted it puts back itself.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    if os.environ.get("PACELINE_REQUEUE") != "1":
        if os.environ.get("ENVIRONMENT") != "BATCH":
            return  # salloc: nothing is in a queue
        sys.stderr.write(
            f"paceline: job {job} is not put back in the queue. HINT: paceline submit --requeue, "
            f"or PACELINE_REQUEUE=1 in the batch script, or by hand: scontrol requeue {job}\n"
        )
        return
    sys.stderr.write(f"paceline: job {job} is put back in the queue (scontrol requeue)\n")
    sys.stderr.flush()  # before Slurm ends this script for it
    answer = _run_slurm("scontrol", "requeue", job)
    if answer is None or answer.returncode:
        why = answer.stderr.strip() if answer is not None else "no answer"
        sys.stderr.write(f"paceline: that failed: {why}. HINT: submit it again\n")


def _run_slurm(*command: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
