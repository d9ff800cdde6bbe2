"""The time at which the scheduler ends this job, from the environment."""

from .env_numbers import Environment

NAMES = ("PACELINE_END_TIME", "SLURM_JOB_END_TIME")  # the first that is set is used


def end_time(environment: Environment) -> float | None:
    """Return the end of the job's time limit, in seconds since 1970; it may be in the past.

    None if the environment does not have it.

    Raises:
        ValueError: The value is not a time.
    """
    name = next((name for name in NAMES if environment.get(name)), None)
    if name is None:
        return None
    try:
        return float(environment[name])
    except ValueError:
        raise ValueError(
            f"the environment has {name}={environment[name]!r}, which is not a time. HINT: give "
            "seconds since 1970, such as the output of `date -d '+2 hours' +%s`"
        ) from None
