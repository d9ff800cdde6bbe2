"""What PyTorch's elastic agent asks for before each attempt: where the ranks meet."""

from typing import Protocol

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)


class Host(Protocol):
    """That the ranks' store is opened on."""

    def open_store(self, port: int) -> tuple[str, int]: ...
    def close_store(self) -> None: ...


class Rendezvous(RendezvousHandler):
    """All hosts are there before the agent runs; the ranks' store is new every time."""

    def __init__(self, run_id: str, host: Host, port: int) -> None:
        """host: that the store is opened on."""
        self._run_id, self.host, self._port = run_id, host, port
        self.waiting = 0  # hosts to go on with; the ranks have left for that

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
