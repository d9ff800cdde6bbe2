"""Detection of the scheduler and the allocation that this process runs in."""

from . import cobalt, flux, lsf, pbs, slurm
from .allocation import Allocation
from .env_numbers import Environment


def find_allocation(environment: Environment) -> Allocation | None:
    """Return the allocation that this process runs in, or None.

    Raises:
        ValueError: Environment variables of a scheduler contradict each other.
    """
    return (
        slurm.allocation(environment)
        or lsf.allocation(environment)
        or pbs.allocation(environment)
        or flux.allocation(environment)
        or cobalt.allocation(environment)
    )
