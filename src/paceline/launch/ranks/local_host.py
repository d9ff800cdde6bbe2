"""The ranks of this host, forked by the rank server that this process controls."""

import contextlib
import errno
import gc
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..job_folder import write_attempt
from ..linux_processes import is_ready, signal_name
from ..monitor.progress import ProgressMonitor, ProgressReport
from ..monitor.rank_messages import MAKE_ROOM_SIGNAL
from .fork_server import MESSAGE_BYTES, RankStart, send_start
from .framework_variables import free_ports
from .host import Host
from .store_gate import AskAgents, StoreGate, open_store

NO_PID = -1  # of a rank that could not be started
SERVER_TIMEOUT_S = 1.0  # for the rank server to read its messages when many are waiting

if TYPE_CHECKING:  # loaded by every command: keep imports few
    from ...cluster.binding_plan import RankBinding


class ForkedRankServer(BaseException):
    """Raised in the forked rank server to unwind the command line's stack, so that a rank's
    traceback shows only few lines below the script. ``cli.main`` catches it.
    """

    def __init__(self, channel: socket.socket, folder: Path, preloads: list[str]) -> None:
        super().__init__()
        self.channel, self.folder, self.preloads = channel, folder, preloads


def start_server(folder: Path, preloads: list[str], close: Iterable[int] = ()) -> "RankServer":
    """Import torch, then fork the process that the ranks are forked from.

    Args:
        preloads: Modules that the server imports once for all ranks.
        close: Descriptors that the server must close: a copy would keep a connection open that is
            to end with this process.
    """
    gc.disable()  # garbage collection during imports frees nothing and costs a third of the time
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
    """The rank server, as seen by the process that forked it."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid, self.channel = pid, channel

    def describe_end(self) -> str:
        """Return how the server ended, for a server that has ended or is just ending."""
        try:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except OSError:
            return "has ended"
        if end is None or end.si_code == os.CLD_EXITED:
            return "has ended"
        return f"was killed by {signal_name(end.si_status)}"

    def end(self, grace: float) -> None:
        """End all ranks and the server; the server keeps the records and removes the folder."""
        with contextlib.suppress(OSError):
            self.channel.send(json.dumps({"end": grace}).encode())
        self.channel.close()
        os.kill(self.pid, signal.SIGCONT)  # a stopped server ends no ranks
        os.waitpid(self.pid, 0)


class OutputReader(Protocol):
    """Takes the read ends of a rank's stdout, stderr and status pipes."""

    def add_rank(self, rank: int, pipes: tuple[int, int, int]) -> None: ...


class LocalHost:
    """The host of the job that this process runs on."""

    def __init__(
        self,
        server: RankServer,
        environment: dict[str, str],
        places: "list[RankBinding]",
        variables_by_local_rank: list[dict[str, str]],
        address: str = "127.0.0.1",
        smt: bool | None = None,
    ) -> None:
        """Control the ranks through ``server``.

        Args:
            environment: Environment variables of every rank.
            places: Placement of each local rank.
            variables_by_local_rank: Environment variables of each local rank.
            address: Address by which ranks of other hosts reach a store here.
            smt: Value that the placement was planned with.
        """
        self.name, self.address = socket.gethostname(), address
        self._server, self._channel = server, server.channel
        self._environment, self._places, self._variables_by_local_rank = (
            environment,
            places,
            variables_by_local_rank,
        )
        self._smt = smt
        self._output: OutputReader | None = None
        self._pids: dict[int, int] = {}  # of the current attempt
        self._local_ranks: dict[int, int] = {}
        self._running: set[int] = set()
        self._exit_reasons: dict[int, str] = {}
        # exits that were received and not yet returned
        self._pending_exits: list[dict[str, Any]] = []
        self._store: Any = None
        self._gate: StoreGate | None = None
        # asks the agents of other nodes who connects to the store, if the job has other nodes
        self.ask_agents: AskAgents | None = None
        self.report: Callable[[str], object] | None = None  # prints messages about the store
        self._attempt = ""
        self._progress_monitor = ProgressMonitor(Path(environment["PACELINE_RECORD"]))
        # whether the server has imported the preloaded modules; updated by take_exits()
        self.ready = False
        self.server_ended = False  # whether the server has ended
        # the launcher is on this host and receives the signal itself
        self.termination_requested = False

    def fileno(self) -> int:
        return self._channel.fileno()

    def set_output(self, output: "OutputReader") -> None:
        """Send the ranks' output to ``output``."""
        self._output = output

    def set_peers(self, hosts: Sequence[Host]) -> None:
        pass  # this host is the only one

    def open_store(self, port: int) -> tuple[str, int]:
        """Open a new store on the job's interface only, for processes of the job's user only, and
        close the previous one.
        """
        self.close_store()
        try:
            self._store, self._gate = open_store(self.address, port, self.ask_agents, self.report)
        except OSError as error:
            if port == 0 or error.errno != errno.EADDRINUSE:
                raise ValueError(
                    f"the store of the job can't listen at {self.address}: {error.strerror}. HINT: "
                    "GLOO_SOCKET_IFNAME=NAME selects another interface"
                ) from error
            raise ValueError(
                f"port {port} is in use. HINT: choose another --port, or leave it out: Paceline "
                "then selects a free one"
            ) from error
        return self.address, int(self._store.port)

    def close_store(self) -> None:
        self._store = None
        if self._gate is not None:
            self._gate.close()
            self._gate = None

    def answer_gate(self, number: int, is_of_user: bool) -> None:
        """Take an agent's answer about a connection to the store."""
        if self._gate is not None:
            self._gate.answer(number, is_of_user)

    def progress(self) -> ProgressReport:
        """Return the progress of this host's ranks."""
        return self._progress_monitor.poll()

    def give_up(self) -> None:
        raise AssertionError("this host always answers")

    def set_can_stop_early(self, can_stop_early: bool) -> None:
        pass

    def bindings(self) -> dict[str, Any]:
        """Return where this host's ranks are bound, read back from the kernel."""
        from ..affinity.report_bindings import report_host

        running = {
            rank: (self._pids[rank], self._local_ranks[rank])
            for rank in self._running
            if self._pids[rank] != NO_PID
        }
        return report_host(self._places, running, self._smt)

    def free_ports(self, count: int) -> list[int]:
        return free_ports(count)

    def start(self, rank: int, local_rank: int, variables: dict[str, str]) -> None:
        """Fork a rank. If the rank server has ended, ``take_exits`` reports the rank as killed.

        Raises:
            OSError: No file descriptors are left.
        """
        self._note_attempt(variables["TORCHELASTIC_RESTART_COUNT"])
        pipes = [os.pipe() for _ in range(3)]
        environment = {
            **self._environment,
            **self._variables_by_local_rank[local_rank],
            **variables,
        }
        place = self._places[local_rank]
        memory = place.memory[0] if place.cpus and len(place.memory) == 1 else None
        write_ends = (pipes[0][1], pipes[1][1], pipes[2][1])
        assert self._output is not None
        self._output.add_rank(rank, (pipes[0][0], pipes[1][0], pipes[2][0]))
        self._pids[rank], self._local_ranks[rank] = NO_PID, local_rank
        self._running.add(rank)
        try:
            send_start(self._channel, RankStart(environment, place.cpus, memory, write_ends))
            while (reply := self._receive()) is not None:
                if "pid" in reply:
                    self._pids[rank] = int(reply["pid"])
                    return
                self._pending_exits.append(reply)  # exits of other ranks may come first
        except ConnectionError:
            pass
        self.server_ended = True

    def _note_attempt(self, number: str) -> None:
        """Note in the job's folder which attempt is the last, even if no rank records anything."""
        if number != self._attempt:
            self._attempt = number
            write_attempt(Path(self._environment["PACELINE_RECORD"]), int(number))
            self._progress_monitor.reset()

    def wait(self, seconds: float) -> None:
        """Wait this long, or until the rank server reports that a rank has ended."""
        if self.server_ended:
            time.sleep(seconds)
        elif not self._pending_exits:
            is_ready(self._channel.fileno(), select.POLLIN, seconds)

    def take_exits(self) -> Iterator[tuple[int, int, float]]:
        """Yield (rank, exit code or minus the signal, monotonic time) of ranks that ended since the
        last call.
        """
        messages, self._pending_exits = self._pending_exits, []
        self._channel.setblocking(False)
        try:
            while (message := self._receive()) is not None:
                messages.append(message)
            server_ended = True  # the server has ended, and the ranks with it
        except BlockingIOError:
            server_ended = False
        except ConnectionError:
            server_ended = True
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
            self._exit_reasons[rank] = (
                f"was lost: the rank server (process {self._server.pid}), from which Paceline "
                f"forks the ranks, {self._server.describe_end()}. HINT: if no user or scheduler "
                "killed it, the node was probably out of memory: see dmesg"
            )
            yield rank, -signal.SIGKILL, time.monotonic()

    def signal(self, rank: int, kind: int) -> None:
        """Signal a rank and the processes that are still in its session, even after its exit.
        SIGUSR1, SIGUSR2 and MAKE_ROOM_SIGNAL go to the rank alone.
        """
        if self._pids.get(rank, NO_PID) == NO_PID:
            return
        group = kind not in (signal.SIGUSR1, signal.SIGUSR2, MAKE_ROOM_SIGNAL)
        message = {"signal": self._pids[rank], "kind": int(kind), "group": group}
        # Only the server knows which PIDs still belong to ranks.
        is_ready(self._channel.fileno(), select.POLLOUT, SERVER_TIMEOUT_S)
        # an error: the server has ended and its ranks with it, or it is stopped
        with contextlib.suppress(OSError):
            self._channel.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)

    def exit_reason(self, rank: int) -> str:
        """Return whether memory ran out on this host, or ""."""
        return self._exit_reasons.get(rank, "")

    def to_local_time(self, at: float) -> float:
        return at

    def _receive(self) -> dict[str, Any] | None:
        data = self._channel.recv(MESSAGE_BYTES)
        return json.loads(data) if data else None
