"""The hosts that a scheduler has given to this job."""

from dataclasses import dataclass

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
