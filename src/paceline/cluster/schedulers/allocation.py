"""The hosts that a scheduler has allocated to this job."""

from dataclasses import dataclass

from .hostfile import Host


@dataclass(frozen=True)
class Allocation:
    """A job's hosts.

    Attributes:
        scheduler: Name of the scheduler.
        job: Job id.
        tool: Program that starts one process per host.
        ends_at: End of the job's time limit, in seconds since 1970; None if unknown.
        note: Warning for the user about hosts of the job that are left out; empty if none are.
        launch_node: Name of a node that runs the job's script and is not a compute node.
    """

    scheduler: str
    job: str
    hosts: tuple[Host, ...]
    tool: str
    ends_at: float | None = None
    launch_node: str | None = None
    note: str = ""
