"""Where am I: the hosts that a scheduler has given to this job, as its variables say."""

from dataclasses import dataclass

from .env_numbers import Environment
from .hostfile import Host


@dataclass(frozen=True)
class Allocation:
    """A job's hosts. ``tool`` starts one process a host there."""

    scheduler: str
    job: str
    hosts: tuple[Host, ...]
    tool: str
    ends_at: float | None = None  # seconds since the epoch
    launch_node: str | None = None  # runs the job's script and is no compute node


def find(environment: Environment) -> Allocation | None:
    """The allocation that this process is in. ValueError where what is said of it can't be."""
    from . import cobalt, flux, lsf, pbs, slurm  # they make Allocations

    return (
        slurm.allocation(environment)
        or lsf.allocation(environment)
        or pbs.allocation(environment)
        or flux.allocation(environment)
        or cobalt.allocation(environment)
    )
