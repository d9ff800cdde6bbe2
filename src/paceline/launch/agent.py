"""PyTorch's elastic agent with two parts of our own: a store for each attempt, and ranks that
are forked from a process that has imported torch.

PyTorch's agents share one store between restarts; ranks of a new attempt then find the old
attempt's keys and connect to the dead (`connectFullMesh ... Connection refused`). Here every
attempt has a fresh store on a port that is bound before any rank starts. And there is one agent
for all hosts of the job, so that one place knows which rank failed first.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch._C._distributed_c10d import HashStore
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

from . import frameworks
from .deaths import Watched, describe, first
from .interrupt import Interrupt
from .layout import Seat
from .lines import Output
from .progress import Progress
from .silence import CODE, Hang, Silence

GRACE = 3.0  # seconds between asking a rank to end and killing it
SETTLE = 0.3  # after a first failure: time for an earlier one to become known
EXIT_SECONDS = 10.0  # for a rank that has finished to leave its interpreter


class Host(Protocol):
    """What the agent needs of a host: ``here.Here``, or ``there.There`` over a channel."""

    name: str
    address: str  # by which the other hosts reach it

    def show(self, output: Output) -> None: ...
    def open_store(self, port: int) -> tuple[str, int]: ...
    def close_store(self) -> None: ...
    def free_ports(self, count: int) -> list[int]: ...
    def start(self, rank: int, local_rank: int, variables: dict[str, str]) -> None: ...
    def deaths(self) -> Iterator[tuple[int, int, float]]: ...
    def signal(self, rank: int, kind: int) -> None: ...
    def why(self, rank: int) -> str: ...  # what it has to do with a rank's end, or ""
    def progress(self) -> Progress: ...
    def give_up(self) -> None: ...  # it is silent: not waited for any more
    def ours(self, at: float) -> float: ...  # a time of its monotonic clock, on this host's


class Rendezvous(RendezvousHandler):
    """All hosts are there before the agent runs; the ranks' store is new every time."""

    def __init__(self, run_id: str, host: Host, port: int) -> None:
        self._run_id, self._host, self._port = run_id, host, port

    def next_rendezvous(self) -> RendezvousInfo:
        address, port = self._host.open_store(self._port)
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
        return 0

    def shutdown(self) -> bool:
        self._host.close_store()
        return True


class Agent(SimpleElasticAgent):
    """Starts, watches and ends the ranks of all hosts."""

    # Set before it runs: what tells this agent what ranks say, and whether Ctrl-C was pressed.
    output: Output
    interrupt: Interrupt
    silence: Silence
    summary: Path | None = None  # where to write the figures that rank 0 sends

    def __init__(
        self, spec: WorkerSpec, hosts: Sequence[Host], seats: list[Seat], started: int
    ) -> None:
        """seats: of the ranks, in their order. started: when the command began, ns of this
        host's monotonic clock."""
        super().__init__(spec, exit_barrier_timeout=60)
        self._hosts, self._seats = hosts, seats
        self._started = started
        self.ranks: list[Watched] = []
        self.cause: Watched | None = None  # of the last attempt's failure
        self.hang: Hang | None = None  # where that is why it was ended
        self.signals: list[int] = []  # to be passed on

    # what SimpleElasticAgent asks for

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        attempt = spec.max_restarts - self._remaining_restarts
        if attempt:
            self.output.say(
                f"paceline: starting again from the last checkpoint ({attempt} of "
                f"{spec.max_restarts})\n"
            )
        self.ranks, self.cause, self.hang = [], None, None
        workers, coordinator = self._workers()
        environment = dict(os.environ)
        for worker in worker_group.workers:
            self.output.tails[worker.global_rank].clear()
            variables = {
                **self._variables(worker_group, worker, attempt),
                **frameworks.variables(workers, worker.global_rank, coordinator, environment),
            }
            seat = self._seats[worker.global_rank]
            # Watched from before it starts: what it says at once is not lost.
            self.ranks.append(Watched(worker.global_rank, self._where(seat)))
            self._hosts[seat.host].start(worker.global_rank, seat.local_rank, variables)
        return {rank.rank: None for rank in self.ranks}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.interrupt.check()
        self._listen()
        self._forward()
        if first(self.ranks) is not None or any(not rank.running for rank in self.ranks):
            self.output.drain()  # a rank's last words come before its death
        if first(self.ranks) is not None:
            self._settle()
            self.cause = first(self.ranks)
            assert self.cause is not None
            return RunResult(state=WorkerState.FAILED)
        self._end_stuck()
        if any(rank.running and rank.finished is None for rank in self.ranks):
            self.hang = self.silence.check(self._progress, self.output.say)
        if self.hang is not None:
            for host in self._hosts:
                if host.name in self.hang.silent:
                    host.give_up()
            self.cause = Watched(self.hang.rank or 0, exit_code=CODE)
            return RunResult(state=WorkerState.FAILED)
        if any(rank.running for rank in self.ranks):
            return RunResult(state=WorkerState.HEALTHY)
        results = {rank.rank: None for rank in self.ranks}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=results)

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        if self.hang is not None:  # told before anybody is ended
            self.output.say(f"{self.hang.told}  The job hangs: its ranks are ended.\n")
        self.end_ranks()
        self.output.drain()
        if self.cause is not None and self.hang is None:
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
                    self._signal(rank, signal.SIGTERM)
                    self._signal(rank, signal.SIGCONT)  # who is stopped could not hear it
            while time.monotonic() < deadline and any(rank.running for rank in self.ranks):
                time.sleep(0.01)
                self._listen()
        except KeyboardInterrupt:
            pass
        for rank in self.ranks:  # those whose leader has ended may have left others behind
            self._signal(rank, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and any(rank.running for rank in self.ranks):
            time.sleep(0.005)
            self._listen()

    def _variables(self, group: WorkerGroup, worker: Any, attempt: int) -> dict[str, str]:
        spec, seat = group.spec, self._seats[worker.global_rank]
        started = self._started if attempt == 0 else time.monotonic_ns()
        return {
            "PACELINE_STARTED_NS": str(started),
            "LOCAL_RANK": str(seat.local_rank),
            "RANK": str(worker.global_rank),
            "GROUP_RANK": str(seat.host),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": str(seat.local_size),
            "WORLD_SIZE": str(len(self._seats)),
            "GROUP_WORLD_SIZE": str(len(self._hosts)),
            "ROLE_WORLD_SIZE": str(len(self._seats)),
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

    def _forward(self) -> None:
        """Pass the user's signals (a scheduler's warning, say) on to the ranks."""
        while self.signals:
            kind = self.signals.pop(0)
            self.output.say(f"paceline: {signal.Signals(kind).name} is passed on to the ranks\n")
            for rank in self.ranks:
                if rank.running:
                    self._signal(rank, kind)

    def _workers(self) -> tuple[list[frameworks.Worker], int]:
        """Ports for what TensorFlow and JAX listen on: one a rank, and JAX's coordinator's."""
        counts = Counter(seat.host for seat in self._seats)
        ports = {
            number: self._hosts[number].free_ports(count + (number == 0))
            for number, count in counts.items()
        }
        coordinator = ports[0].pop()
        places = [
            frameworks.Worker(
                seat.host,
                seat.local_rank,
                self._hosts[seat.host].address,
                ports[seat.host][seat.local_rank],
            )
            for seat in self._seats
        ]
        return places, coordinator

    def _signal(self, rank: Watched, kind: int) -> None:
        self._hosts[self._seats[rank.rank].host].signal(rank.rank, kind)

    def _where(self, seat: Seat) -> str:
        return self._hosts[seat.host].name if len(self._hosts) > 1 else ""

    def _listen(self) -> None:
        """Take in which ranks have ended."""
        for host in self._hosts:
            for number, status, at in host.deaths():
                rank = self.ranks[number] if number < len(self.ranks) else None
                if rank is not None and rank.running:
                    rank.exit_code, rank.ended_at = status, at
                    rank.lost = host.why(number)

    def hear(self, number: int, message: dict[str, Any]) -> None:
        """What a rank tells the launcher; called from the output's thread."""
        rank = self.ranks[number] if number < len(self.ranks) else None
        if rank is not None and "exception" in message:
            host = self._hosts[self._seats[number].host]
            rank.exception, rank.raised_at = message["exception"], host.ours(message["at"])
        elif rank is not None and "finished" in message:
            rank.finished, rank.finished_at = message["finished"], time.monotonic()
        elif "summary" in message and self.summary is not None:
            try:
                self.summary.write_text(message["summary"])
            except OSError as error:
                self.output.say(f"paceline: --json {self.summary}: {error.strerror}\n")

    def _progress(self) -> list[Progress]:
        return [host.progress() for host in self._hosts]

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
                self._signal(rank, signal.SIGKILL)
