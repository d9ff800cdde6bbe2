"""The allocation of this job: its hosts, and the end of its time limit."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .env_numbers import Environment
from .hostfile import Host

# Environment variables with the end of the time limit; the first that is set is used.
END_TIME_NAMES = ("PACELINE_END_TIME", "SLURM_JOB_END_TIME")


@dataclass(frozen=True)
class Allocation:
    """A job's hosts.

    Attributes:
        scheduler: Name of the scheduler.
        job: Job id.
        tool: Program that starts one process per host.
        ends_at: End of the job's time limit, in seconds since 1970; None if unknown.
        note: Warning for the user about hosts of the job that are left out; empty if none are.
    """

    scheduler: str
    job: str
    hosts: tuple[Host, ...]
    tool: str
    ends_at: float | None = None
    note: str = ""


def read_nodefile(environment: Environment, variable: str) -> dict[str, int]:
    """Return the number of lines of each host in a scheduler's node file, in the order of the file.

    ``variable``: environment variable with the path of the file.

    Raises:
        ValueError: The file cannot be read or names no host.
    """
    path = environment[variable]
    try:
        lines = Path(path).read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(
            f"the hosts of this allocation can't be read from {variable}={path}: {why}. "
            "HINT: if the allocation has ended, unset its environment variables, or name hosts "
            "with -H"
        ) from None
    names = [line.strip() for line in lines if line.strip()]
    if not names:
        raise ValueError(
            f"{variable}={path} names no host. HINT: check whether the allocation has ended"
        )
    return count_hosts(names)


def count_hosts(names: list[str]) -> dict[str, int]:
    """Count each name, in the order of first mention."""
    return dict(Counter(names))


def end_time(environment: Environment) -> float | None:
    """Return the end of the job's time limit, in seconds since 1970; it may be in the past.

    None if the environment does not have it.

    Raises:
        ValueError: The value is not a time.
    """
    name = next((name for name in END_TIME_NAMES if environment.get(name)), None)
    if name is None:
        return None
    try:
        return float(environment[name])
    except ValueError:
        raise ValueError(
            f"the environment has {name}={environment[name]!r}, which is not a time. HINT: give "
            "seconds since 1970, such as the output of `date -d '+2 hours' +%s`"
        ) from None
