"""The ranks of this host: forked by the rank server, which this process talks to."""

import datetime
import gc
import json
import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...comm.reachable_address import listen_on
from ..monitor.progress import ProgressMonitor, ProgressReport
from ..records.job_folder import note_attempt
from .fork_server import MESSAGE_BYTES, kill_group
from .framework_variables import free_ports

if TYPE_CHECKING:  # the command line loads this module for every command
    from ...cluster.binding.binding_plan import Place


class ForkedRankServer(BaseException):
    """Raised in the forked rank server to leave the command line's stack behind: what a rank's
    traceback shows below the script is then a few lines. ``cli.main`` catches it."""

    def __init__(self, channel: socket.socket, folder: Path, preloads: list[str]) -> None:
        super().__init__()
        self.channel, self.folder, self.preloads = channel, folder, preloads


def start_server(folder: Path, preloads: list[str], close: Iterable[int] = ()) -> "RankServer":
    """Import torch, then fork the process that the ranks will be forked from.

    close: descriptors that are this process's alone: who else held them would keep a connection
    open that should end with this process.
    """
    gc.disable()  # a collection in the middle of an import finds nothing and costs a third
    if preloads:
        import torch  # noqa: F401  once, before the fork, for this process and all ranks
    parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid:
        gc.enable()
        child_end.close()
        return RankServer(pid, parent_end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    parent_end.close()
    for fd in close:
        os.close(fd)
    raise ForkedRankServer(child_end, folder, preloads)


class RankServer:
    """The rank server, seen from the process that has forked it."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid, self.channel = pid, channel

    def end(self, grace: float) -> None:
        """Have all ranks and the server end, the records kept, the folder removed."""
        try:
            self.channel.send(json.dumps({"end": grace}).encode())
        except OSError:
            pass
        self.channel.close()
        os.waitpid(self.pid, 0)


class OutputReader(Protocol):
    """Takes the read ends of a rank's stdout, stderr and status pipes."""

    def add_rank(self, rank: int, pipes: tuple[int, int, int]) -> None: ...


class LocalHost:
    """A host of the job, and that is this one."""

    def __init__(
        self,
        server: RankServer,
        environment: dict[str, str],
        places: "list[Place]",
        variables_by_local_rank: list[dict[str, str]],
        address: str = "127.0.0.1",
        smt: bool | None = None,
    ) -> None:
        """environment: of every rank. places: of each local rank; own: its variables. address:
        where the ranks of other hosts reach a store here. smt: as the places were planned with."""
        self.name, self.address = socket.gethostname(), address
        self._channel = server.channel
        self._environment, self._places, self._variables_by_local_rank = (
            environment,
            places,
            variables_by_local_rank,
        )
        self._smt = smt
        self._output: OutputReader | None = None
        self._pids: dict[int, int] = {}  # of the last attempt
        self._local_ranks: dict[int, int] = {}
        self._running: set[int] = set()
        self._exit_reasons: dict[int, str] = {}
        self._pending_exits: list[dict[str, Any]] = []  # deaths, not yet told
        self._store: Any = None
        self._attempt = ""
        self._progress_monitor = ProgressMonitor(Path(environment["PACELINE_RECORD"]))
        self.ready = False  # the server has imported what the ranks need; deaths() sees it
        self.server_ended = False  # the server has ended
        self.termination_requested = False  # the launcher is here as well, and hears that itself

    def fileno(self) -> int:
        return self._channel.fileno()

    def set_output(self, output: "OutputReader") -> None:
        """What the ranks write goes there."""
        self._output = output

    def open_store(self, port: int) -> tuple[str, int]:
        """A new store for the ranks, on the job's interface alone; the last one is closed."""
        from torch._C._distributed_c10d import TCPStore

        self._store = None
        try:
            listening = listen_on(self.address, port)
        except OSError as error:
            if port == 0:
                raise
            raise ValueError(
                f"port {port} is in use. HINT: another --port, or none: a free one is found"
            ) from error
        port = listening.getsockname()[1]
        self._store = TCPStore(
            self.address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=60),
            master_listen_fd=listening.detach(),
        )
        return self.address, port

    def close_store(self) -> None:
        self._store = None

    def progress(self) -> ProgressReport:
        """Whether its ranks move."""
        return self._progress_monitor.poll()

    def give_up(self) -> None:
        raise AssertionError("this host always answers")

    def set_can_stop_early(self, can_stop_early: bool) -> None:
        pass

    def bindings(self) -> dict[str, Any]:
        """Where its ranks really are."""
        from ..affinity.report_bindings import of_host

        running = {rank: (self._pids[rank], self._local_ranks[rank]) for rank in self._running}
        return of_host(self._places, running, self._smt)

    def free_ports(self, count: int) -> list[int]:
        return free_ports(count)

    def start(self, rank: int, local_rank: int, variables: dict[str, str]) -> None:
        """Fork a rank. Raises ValueError for an environment that is too large, OSError where
        descriptors run out, RuntimeError where the rank server has ended."""
        self._note_attempt(variables["TORCHELASTIC_RESTART_COUNT"])
        pipes = [os.pipe() for _ in range(3)]
        environment = {
            **self._environment,
            **self._variables_by_local_rank[local_rank],
            **variables,
        }
        place = self._places[local_rank]
        memory = place.memory[0] if place.cpus and len(place.memory) == 1 else None
        message = {"environment": environment, "cpus": place.cpus, "memory": memory}
        data = json.dumps(message).encode()
        if len(data) > MESSAGE_BYTES:
            raise ValueError(f"the environment takes {len(data)} bytes, more than can be passed on")
        socket.send_fds(self._channel, [data], [write_end for _, write_end in pipes])
        for _, write_end in pipes:
            os.close(write_end)
        assert self._output is not None
        self._output.add_rank(rank, (pipes[0][0], pipes[1][0], pipes[2][0]))
        while True:  # deaths of other ranks may be told first
            reply = self._receive()
            if reply is None:
                raise RuntimeError("the process that ranks are forked from has ended")
            if "pid" in reply:
                break
            self._pending_exits.append(reply)
        self._pids[rank], self._local_ranks[rank] = int(reply["pid"]), local_rank
        self._running.add(rank)

    def _note_attempt(self, number: str) -> None:
        """For the records: which attempt was the last, also where a rank never wrote of it."""
        if number != self._attempt:
            self._attempt = number
            note_attempt(Path(self._environment["PACELINE_RECORD"]), int(number))
            self._progress_monitor.reset()

    def take_exits(self) -> Iterator[tuple[int, int, float]]:
        """(rank, exit code or minus the signal, when on the monotonic clock) of those that have
        ended since the last call."""
        messages, self._pending_exits = self._pending_exits, []
        self._channel.setblocking(False)
        try:
            while (message := self._receive()) is not None:
                messages.append(message)
            server_ended = True  # the server has gone, and takes the ranks with it
        except BlockingIOError:
            server_ended = False
        finally:
            self._channel.setblocking(True)
        ranks = {self._pids[rank]: rank for rank in self._running}
        self.server_ended = self.server_ended or server_ended
        for message in messages:
            self.ready = self.ready or "ready" in message
            if message.get("died") in ranks:
                rank = ranks[message["died"]]
                self._exit_reasons[rank] = message["why"]
                self._running.discard(rank)
                yield rank, message["status"], message["at"]
        for rank in sorted(self._running) if server_ended else []:
            self._running.discard(rank)
            yield rank, -signal.SIGKILL, time.monotonic()

    def signal(self, rank: int, kind: int) -> None:
        """Signal a rank and all in its session that did not leave it, also where it has ended.
        The user's own signals go to the rank alone."""
        if rank in self._pids and kind not in (signal.SIGUSR1, signal.SIGUSR2):
            kill_group(self._pids[rank], kind)
        elif rank in self._running:
            os.kill(self._pids[rank], kind)  # not reaped before we have heard of its end

    def exit_reason(self, rank: int) -> str:
        """Whether memory ran out on this host, or ""."""
        return self._exit_reasons.get(rank, "")

    def to_local_time(self, at: float) -> float:
        return at

    def _receive(self) -> dict[str, Any] | None:
        data = self._channel.recv(MESSAGE_BYTES)
        return json.loads(data) if data else None
