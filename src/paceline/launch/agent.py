"""PyTorch's elastic agent with two parts of our own: a store for each attempt, and ranks that
are forked from a process that has imported torch.

PyTorch's agents share one store between restarts; ranks of a new attempt then find the old
attempt's keys and connect to the dead (`connectFullMesh ... Connection refused`). Here every
attempt has a fresh store on a port that is bound before any rank starts.
"""

import datetime
import json
import os
import signal
import socket
import time
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from .deaths import Watched, describe, first
from .interrupt import Interrupt
from .lines import ERR, OUT, STATUS, Output
from .server import MESSAGE_BYTES, kill_group

GRACE = 3.0  # seconds between asking a rank to end and killing it
SETTLE = 0.3  # after a first failure: time for an earlier one to become known
EXIT_SECONDS = 10.0  # for a rank that has finished to leave its interpreter


class LocalRendezvous(RendezvousHandler):
    """One host, one agent; a new store every time."""

    def __init__(self, run_id: str, port: int) -> None:
        self._run_id = run_id
        self._port = port
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = None  # closes the last attempt's
        try:
            self._store = TCPStore(
                "127.0.0.1",
                self._port,
                is_master=True,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=60),
            )
        except (DistNetworkError, RuntimeError) as error:
            raise ValueError(
                f"port {self._port} is in use. HINT: another --port, or none: a free one is found"
            ) from error
        info = RendezvousStoreInfo("127.0.0.1", self._store.port)
        return RendezvousInfo(self._store, 0, 1, info)

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
        return 0

    def shutdown(self) -> bool:
        self._store = None
        return True


class Agent(SimpleElasticAgent):
    """Starts, watches and ends the ranks of this host through the rank server."""

    # Set before it runs: what tells this agent what ranks say, and whether Ctrl-C was pressed.
    output: Output
    interrupt: Interrupt

    def __init__(
        self,
        spec: WorkerSpec,
        channel: socket.socket,
        environment: dict[str, str],
        cpus: list[list[int]],
        started: int,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout=60)
        self._channel = channel
        self._environment = environment
        self._cpus = cpus
        self._started = started  # of the command, ns of the monotonic clock
        self.ranks: list[Watched] = []
        self.cause: Watched | None = None  # of the last attempt's failure

    # what SimpleElasticAgent asks for

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        attempt = spec.max_restarts - self._remaining_restarts
        if attempt:
            self.output.say(
                f"paceline: starting again from the last checkpoint ({attempt} of "
                f"{spec.max_restarts})\n"
            )
        self.ranks, self.cause = [], None
        for worker in worker_group.workers:
            self.output.tails[worker.global_rank].clear()
            variables = self._variables(worker_group, worker, attempt)
            pid = self._start(worker.global_rank, worker.local_rank, variables)
            self.ranks.append(Watched(worker.global_rank, pid))
        return {rank.rank: rank.pid for rank in self.ranks}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.interrupt.check()
        self._listen()
        if first(self.ranks) is not None or any(not rank.running for rank in self.ranks):
            self.output.drain()  # a rank's last words come before its death
        if first(self.ranks) is not None:
            self._settle()
            self.cause = first(self.ranks)
            assert self.cause is not None
            return RunResult(state=WorkerState.FAILED)
        self._end_stuck()
        if any(rank.running for rank in self.ranks):
            return RunResult(state=WorkerState.HEALTHY)
        results = {rank.rank: None for rank in self.ranks}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=results)

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        self.end_ranks()
        self.output.drain()
        if self.cause is not None:
            tail = list(self.output.tails[self.cause.rank])
            self.output.say(describe(self.cause, tail, len(self.ranks) - 1))

    def _shutdown(self, death_sig: Any = signal.SIGTERM, timeout: int = 30) -> None:
        self.end_ranks()

    def _record_worker_events(self, result: RunResult) -> None:
        """Nothing: these events look up the host's name, which takes long on some hosts."""

    # our part

    def end_ranks(self, grace: float = GRACE) -> None:
        """End every rank that runs: asked first, killed after ``grace`` seconds. A second
        Ctrl-C meanwhile kills at once."""
        deadline = time.monotonic() + grace
        try:
            for rank in self.ranks:
                if rank.running:
                    kill_group(rank.pid, signal.SIGTERM)
            while time.monotonic() < deadline and any(rank.running for rank in self.ranks):
                time.sleep(0.01)
                self._listen()
        except KeyboardInterrupt:
            pass
        for rank in self.ranks:  # those whose leader has ended may have left others behind
            kill_group(rank.pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and any(rank.running for rank in self.ranks):
            time.sleep(0.005)
            self._listen()

    def _variables(self, group: WorkerGroup, worker: Any, attempt: int) -> dict[str, str]:
        spec = group.spec
        return {
            **self._environment,
            "PACELINE_STARTED_NS": str(self._started if attempt == 0 else time.monotonic_ns()),
            "LOCAL_RANK": str(worker.local_rank),
            "RANK": str(worker.global_rank),
            "GROUP_RANK": str(group.group_rank),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "WORLD_SIZE": str(worker.world_size),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "PACELINE_STORE_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
        }

    def _start(self, rank: int, local_rank: int, environment: dict[str, str]) -> int:
        pipes = [os.pipe() for _ in range(3)]
        message = {"environment": environment, "cpus": self._cpus[local_rank]}
        data = json.dumps(message).encode()
        if len(data) > MESSAGE_BYTES:
            raise ValueError(f"the environment takes {len(data)} bytes, more than can be passed on")
        socket.send_fds(self._channel, [data], [inlet for _, inlet in pipes])
        for _, inlet in pipes:
            os.close(inlet)
        for stream, (outlet, _) in zip((OUT, ERR, STATUS), pipes, strict=True):
            self.output.add(rank, stream, outlet)
        while True:  # deaths of other ranks may be told first
            reply = self._receive()
            if reply is None:
                raise RuntimeError("the process that ranks are forked from has ended")
            if "pid" in reply:
                return int(reply["pid"])
            self._died(reply)

    def _receive(self) -> dict[str, Any] | None:
        data = self._channel.recv(MESSAGE_BYTES)
        return json.loads(data) if data else None

    def _died(self, message: dict[str, Any]) -> None:
        for rank in self.ranks:
            if rank.pid == message["died"] and rank.running:
                rank.exit_code, rank.ended_at = message["status"], message["at"]

    def _listen(self) -> None:
        """Take in what the rank server has said."""
        self._channel.setblocking(False)
        try:
            while (message := self._receive()) is not None:
                self._died(message)
            for rank in self.ranks:  # the server has gone, and takes the ranks with it
                if rank.running:
                    rank.exit_code, rank.ended_at = -signal.SIGKILL, time.monotonic()
        except BlockingIOError:
            pass
        finally:
            self._channel.setblocking(True)

    def hear(self, number: int, message: dict[str, Any]) -> None:
        """What a rank tells the launcher; called from the output's thread."""
        rank = next((r for r in self.ranks if r.rank == number), None)
        if rank is not None and "exception" in message:
            rank.exception, rank.raised_at = message["exception"], message["at"]
        elif rank is not None and "finished" in message:
            rank.finished, rank.finished_at = message["finished"], time.monotonic()

    def _settle(self) -> None:
        """A failure is known; give an earlier one a moment to become known as well."""
        deadline = time.monotonic() + SETTLE
        while time.monotonic() < deadline:
            time.sleep(0.01)
            self._listen()

    def _end_stuck(self) -> None:
        """Kill ranks that finished but do not exit, once all others have."""
        running = [rank for rank in self.ranks if rank.running]
        if not running or any(rank.finished_at is None for rank in running):
            return
        if time.monotonic() - max(r.finished_at or 0.0 for r in running) > EXIT_SECONDS:
            for rank in running:
                self.output.say(
                    f"paceline: rank {rank.rank} finished its script but did not exit within "
                    f"{EXIT_SECONDS:.0f} s; it was ended (its work is done)\n"
                )
                kill_group(rank.pid, signal.SIGKILL)
