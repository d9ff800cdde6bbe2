"""When the scheduler ends this job, as the environment says it."""

from .env_numbers import Environment

NAMES = ("PACELINE_END_TIME", "SLURM_JOB_END_TIME")  # the first that is set counts


def end_time(environment: Environment) -> float | None:
    """Seconds since 1970, be they past or not; None where nothing is said. ValueError for what is
    no time."""
    name = next((name for name in NAMES if environment.get(name)), None)
    if name is None:
        return None
    try:
        return float(environment[name])
    except ValueError:
        raise ValueError(
            f"the environment has {name}={environment[name]!r}, which is no time. HINT: seconds "
            "since 1970, as of `date -d '+2 hours' +%s`"
        ) from None
