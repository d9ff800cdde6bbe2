"""Rendezvous handler for PyTorch's elastic agent: provides the ranks' store before each attempt."""

from typing import Protocol

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)


class Host(Protocol):
    """The host on which the ranks' store is opened."""

    def open_store(self, port: int) -> tuple[str, int]: ...
    def close_store(self) -> None: ...


class Rendezvous(RendezvousHandler):
    """Rendezvous of a job whose hosts are all connected before the elastic agent runs.

    Each attempt gets a new store.

    Attributes:
        host: Host on which the store is opened.
        waiting: Number of hosts with which the job continues; the ranks have exited for that.
    """

    def __init__(self, run_id: str, host: Host, port: int) -> None:
        self._run_id, self.host, self._port = run_id, host, port
        self.waiting = 0

    def next_rendezvous(self) -> RendezvousInfo:
        self.waiting = 0
        address, port = self.host.open_store(self._port)
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(address, port))

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "paceline"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return self.waiting

    def shutdown(self) -> bool:
        self.host.close_store()
        return True
