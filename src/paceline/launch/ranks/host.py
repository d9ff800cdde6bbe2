"""The interface between the elastic agent and a host of the job."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ..monitor.output import RankOutput
from ..monitor.progress import ProgressReport


class Host(Protocol):
    """A host of the job: ``LocalHost``, or ``RemoteHost`` over a channel."""

    name: str
    address: str  # by which the other hosts reach it
    termination_requested: bool  # whether the scheduler asks this host's agent to end

    def set_output(self, output: RankOutput) -> None: ...
    def set_peers(self, hosts: "Sequence[Host]") -> None: ...  # all hosts of the job
    def open_store(self, port: int) -> tuple[str, int]: ...
    def close_store(self) -> None: ...
    def free_ports(self, count: int) -> list[int]: ...
    def start(self, rank: int, local_rank: int, variables: dict[str, str]) -> None: ...
    def wait(self, seconds: float) -> None: ...  # until then, or until a rank has ended
    def take_exits(self) -> Iterator[tuple[int, int, float]]: ...
    def signal(self, rank: int, kind: int) -> None: ...
    def exit_reason(self, rank: int) -> str: ...  # the host's part in a rank's exit, or ""
    def set_can_stop_early(
        self, can_stop_early: bool
    ) -> None: ...  # so that the ranks are given time to stop
    def progress(self) -> ProgressReport: ...
    def bindings(self) -> dict[str, Any]: ...  # actual bindings of its ranks
    def give_up(self) -> None: ...  # consider the host lost
    def to_local_time(self, at: float) -> float: ...  # converts from its monotonic clock
