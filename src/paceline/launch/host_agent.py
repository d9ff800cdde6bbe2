"""Run the agent of one node of a job on several nodes: ``python -m paceline.launch.host_agent``.

The agent executes the launcher's messages: it checks that the job can run on this node, forks the
rank server, starts and signals ranks, and reports their output and exits. When the channel closes,
for whatever reason, it ends the ranks, keeps their records, and exits.
"""

import argparse
import contextlib
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from ..cluster.rank_identity import launched_by
from ..comm.reachable_address import Listener, try_all, variables
from ..record.ring.tail import MAX_RECORD_BYTES
from ..security.files import read_regular
from ..security.processes import start_ticks
from . import job_folder
from .affinity import bind_ranks
from .channel import (
    START_MARKER,
    Channel,
    InvalidMessageError,
    LauncherNotFoundError,
    connect_to_launcher,
)
from .job import Job, check, preloads
from .linux_processes import SUBREAPER, prctl, signal_checked
from .monitor import live_records
from .monitor.interrupt import DeferredTermination
from .ranks.connection_owner import Endpoint, connection_owner
from .ranks.framework_variables import free_ports
from .ranks.local_host import ForkedRankServer, LocalHost, RankServer, start_server
from .ranks.process_groups import end_remaining_children
from .remote.prepare_hosts import describe_host

# The lock of a node's agent: a job has one agent on each node, even after a restart.
#
# A previous agent, which may still occupy the GPUs while the launcher can't reach it, is ended
# first. The lock is the name of an abstract Unix socket (no file), which nobody can connect to. The
# kernel lists the inode of each name, and each process of this user shows the inodes of its
# sockets: the holder is found without its help, and without that of other users.

# Time for the previous agent to end its ranks. Then it is killed, and its rank server ends them.
PREVIOUS_AGENT_TIMEOUT_S = 6.0
_LOCK_POLL_S = 0.05
_UNIX_SOCKETS = Path("/proc/net/unix")


class HeldByOtherUserError(Exception):
    """A process of another user has the name of the lock."""


def acquire_agent_lock(run: str, place: int) -> socket.socket:
    """Make this process the only agent of a job on a node.

    Args:
        run: ID of the run.
        place: Index of the node in the job.

    Returns:
        The socket that holds the lock as long as it is open.

    Raises:
        HeldByOtherUserError: Another user's process holds the name. It is not waited for.
        ValueError: The previous agent can't be ended.
    """
    name = f"paceline-agent-{os.getuid()}-{run}-{place}"
    began, holder = time.monotonic(), 0
    means = [(PREVIOUS_AGENT_TIMEOUT_S, signal.SIGKILL), (0.0, signal.SIGHUP)]
    while time.monotonic() - began < 2 * PREVIOUS_AGENT_TIMEOUT_S:
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            lock.bind(f"\0{name}")
            return lock
        except OSError:
            lock.close()
        inode = _socket_inode(name)
        if inode is not None:  # else the name is free by now
            holder = _socket_holder(inode)
            if means and time.monotonic() - began >= means[-1][0]:
                _, kind = means.pop()
                _end_previous_agent(holder, kind, name)
        time.sleep(_LOCK_POLL_S)
    raise ValueError(
        f"the previous agent of this job on {socket.gethostname()} (process {holder}) can't be "
        "ended. HINT: end it, or leave the node out"
    )


def _end_previous_agent(pid: int, kind: signal.Signals, name: str) -> None:
    """Send a signal to the process, if it still holds the name."""

    def holds() -> bool:
        inode = _socket_inode(name)
        return inode is not None and _socket_holder(inode) == pid

    with contextlib.suppress(OSError, HeldByOtherUserError):
        # A stopped process handles no signals before SIGCONT.
        signal_checked(pid, [kind, signal.SIGCONT], holds)


def _socket_inode(name: str) -> int | None:
    """Return the inode of the socket that has an abstract name; None if there is none.

    Raises:
        HeldByOtherUserError: The system does not list its sockets.
    """
    end = f" @{name}\n".encode()
    try:
        with _UNIX_SOCKETS.open("rb") as lines:
            found = [int(line.split()[6]) for line in lines if line.endswith(end)]
    except OSError:
        raise HeldByOtherUserError from None
    return max(found, default=None)


def _socket_holder(inode: int) -> int:
    """Return the PID of this user's process that holds a socket, the oldest if it was forked.

    Raises:
        HeldByOtherUserError: No other process of this user holds it.
    """
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        pid = int(entry.name)
        with contextlib.suppress(OSError):  # a process of another user, or one that has ended
            is_own = entry.stat().st_uid == os.geteuid()
            if is_own and _has_socket(pid, inode) and (ticks := start_ticks(pid)):
                found.append((ticks, pid))
    if not found:
        raise HeldByOtherUserError
    return min(found)[1]


def _has_socket(pid: int, inode: int) -> bool:
    folder = f"/proc/{pid}/fd"
    wanted = f"socket:[{inode}]"
    for fd in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"{folder}/{fd}") == wanted:
                return True
    return False


# The agent.

LAUNCHER_TIMEOUT_S = 900.0  # longer than a launcher is usually suspended (Ctrl-Z)
RECORD_CHUNK_BYTES = 4 << 20


class LauncherLostError(Exception):
    """The launcher is gone, or a signal (``signal_number``) asks this agent to end."""

    def __init__(self, reason: str, signal_number: int = signal.SIGKILL) -> None:
        super().__init__(reason)
        self.reason, self.signal_number = reason, int(signal_number)


class HostAgent:
    """One agent. Each message of the launcher has a method: ``do_`` and the message's first key."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.job: Job | None = None
        self.local_host: LocalHost | None = None
        self.server: RankServer | None = None
        self.listener: Listener | None = None
        self.agent_lock: socket.socket | None = None
        self.folder: Path | None = None
        self.sends_records = False  # whether the launcher does not see this node's record folder
        self.pipes: dict[int, tuple[int, int]] = {}  # descriptor -> rank, stream
        self.selector = selectors.DefaultSelector()
        self.selector.register(channel, selectors.EVENT_READ)
        self.store_messages: deque[dict[str, Any]] = deque()  # of the store's thread, to be sent
        self.wake_out, self.wake_in = os.pipe()  # readable if there are any
        os.set_blocking(self.wake_in, False)
        self.selector.register(self.wake_out, selectors.EVENT_READ)
        self.last_message_at = time.monotonic()
        self.finished = False
        self.termination = DeferredTermination()

    def serve(self, agent_number: int) -> None:
        """Handle messages until the launcher ends the job. ``agent_number``: as the tool that
        started the agents counts them. Raises LauncherLostError.
        """
        self.send(place=agent_number)
        self.send(hello=describe_host())
        while not self.finished:
            for key, _ in self.selector.select(1.0):
                self._handle_input(key.fileobj)
            if self.termination.take_new():
                self.send(ending=True)
            if self.termination.expired:
                _raise_on_signal(signal.SIGTERM, None)
            if time.monotonic() - self.last_message_at > LAUNCHER_TIMEOUT_S:
                raise LauncherLostError(
                    f"the launcher has sent nothing for {LAUNCHER_TIMEOUT_S:.0f} s"
                )

    def _handle_input(self, source: Any) -> None:
        if source is self.channel:
            try:
                messages = self.channel.receive()
            except InvalidMessageError as error:
                raise LauncherLostError(f"the launcher sent {error}") from None
            if messages is None:
                raise LauncherLostError("the connection to the launcher has ended")
            self.last_message_at = time.monotonic()
            for message, _ in messages:
                self._dispatch(message)
        elif source is self.local_host:
            self._report_exits()
        elif source == self.wake_out:
            self._send_store_messages()
        elif source in self.pipes:
            self._forward_output(source)
        elif self.listener is not None:
            self.listener.answer(source)

    def _dispatch(self, message: dict[str, Any]) -> None:
        try:
            getattr(self, "do_" + next(iter(message)))(**message)
        except ValueError as mistake:
            self.send(mistake=str(mistake))
        except LauncherLostError:
            raise
        # for example a torch that can't be imported: the launcher prints it
        except Exception as error:
            self.send(mistake=f"{type(error).__name__}: {error}")

    def send(self, raw: bytes = b"", **message: Any) -> None:
        try:
            self.channel.send(message, raw)
        except OSError:
            raise LauncherLostError("the connection to the launcher has ended") from None

    def do_ping(self, ping: float) -> None:
        progress = asdict(self.local_host.progress()) if self.local_host is not None else None
        self.send(pong=ping, at=time.monotonic(), progress=progress)

    def do_check(self, check: dict[str, Any], environment: dict[str, str], folder: str) -> None:
        """Check that the job can run here. ``check``: fields of the Job, with this node's ranks."""
        os.environ.update(environment)
        try:
            os.chdir(folder)
        except OSError as error:
            raise ValueError(
                f"{folder}: {error.strerror}. HINT: start the job in a working directory that "
                "exists on every node, such as one on a shared file system"
            ) from None
        self.job = Job(**{**check, "record": None, "summary": None})
        bind_ranks.take_share(self.job)
        self.source, self.places = check_job(self.job), bind_ranks.plan_bindings(self.job)
        self.send(fits=True)

    def do_listen(self, listen: str | None) -> None:
        """Listen on the addresses by which other nodes may reach this one."""
        self.listener = Listener(listen)
        for listening in self.listener.sockets.values():
            self.selector.register(listening, selectors.EVENT_READ)
        self.send(listening=self.listener.offer())

    def do_reach(self, reach: dict[str, dict[str, Any]]) -> None:
        offers = {int(host): offer for host, offer in reach.items()}
        self.send(reached=try_all(offers, self.listener))

    def do_begin(
        self, begin: dict[str, str], place: int, interface: str, address: str, record: str | None
    ) -> None:
        """Import torch and fork the rank server. Send "ready" once the server has imported its
        modules. ``begin``: environment variables of every rank; ``place``: index of this node.
        """
        assert self.job is not None
        self._stop_listening()
        try:
            self.agent_lock = acquire_agent_lock(begin["PACELINE_RUN"], place)
        except HeldByOtherUserError:
            self.send(
                warning="a process of another user has the name of this job's agent: an agent that "
                "is started again after a lost connection does not find the previous one"
            )
        variables_by_rank = bind_ranks.variables_of_all(self.job, self.places)
        self.folder = job_folder.job_folder()
        job_folder.try_write_label(self.folder, self.job.words, begin["PACELINE_RUN"])
        if record is not None:
            self._choose_record_target(Path(record), begin["PACELINE_RUN"])
        environment = {**os.environ, **begin, "PACELINE_RECORD": str(self.folder)}
        environment.pop("PACELINE_SECRET", None)
        environment = {**variables(interface), **environment}
        own_descriptors = [
            *(*self.channel.descriptors, self.wake_out, self.wake_in),
            *([self.agent_lock.fileno()] if self.agent_lock else []),
        ]
        self.server = start_server(self.folder, preloads(self.job, self.source), own_descriptors)
        self.local_host = LocalHost(
            self.server, environment, self.places, variables_by_rank, address, self.job.smt
        )
        self.local_host.set_output(self)
        self.local_host.ask_agents, self.local_host.report = self.ask_agents, self.report
        # readable when the server is ready
        self.selector.register(self.local_host, selectors.EVENT_READ)

    def do_store(self, store: int | None) -> None:
        assert self.local_host is not None
        if store is None:
            self.local_host.close_store()
            return
        address, port = self.local_host.open_store(store)
        self.send(store=port, address=address)

    def ask_agents(self, number: int, peer: Endpoint, own: Endpoint) -> None:
        """Ask, through the launcher, who connects to the store."""
        self._send_later(whose=number, peer=peer, own=own)

    def report(self, text: str) -> None:
        """Have the launcher print a message."""
        self._send_later(say=text)

    def _send_later(self, **message: Any) -> None:
        """Have the main thread send a message of the store's thread, which must not wait for it:
        the main thread waits for that thread when it closes the store.
        """
        self.store_messages.append(message)
        with contextlib.suppress(BlockingIOError):  # full: the main thread wakes up anyway
            os.write(self.wake_in, b".")

    def _send_store_messages(self) -> None:
        os.read(self.wake_out, 4096)
        while self.store_messages:
            self.send(**self.store_messages.popleft())

    def do_owner(
        self, owner: int, asker: str, peer: list[Any], own: list[Any], is_only: bool
    ) -> None:
        """Tell the agent ``asker`` whether a connection to its store is of the job's user."""
        uid = connection_owner((peer[0], peer[1]), (own[0], own[1]))
        if uid is not None or is_only:
            self.send(owned=owner, asker=asker, is_of_user=uid == os.geteuid())

    def do_admit(self, admit: int, is_of_user: bool) -> None:
        if self.local_host is not None:
            self.local_host.answer_gate(admit, is_of_user)

    def do_ports(self, ports: int) -> None:
        self.send(ports=free_ports(ports))

    def do_start(self, start: int, local_rank: int, variables: dict[str, str]) -> None:
        assert self.local_host is not None
        try:
            self.local_host.start(start, local_rank, variables)
        except (ValueError, OSError, RuntimeError) as error:
            self.send(died=start, status=1, at=time.monotonic(), why=f"was not started: {error}")

    def do_bindings(self, bindings: bool) -> None:
        assert self.local_host is not None
        self.send(bindings=self.local_host.bindings())

    def do_tails(self, tails: int, most: int, stacks: bool) -> None:
        for message, raw in live_records.tail_messages(self.folder, most, stacks):
            self.send(raw, tails=tails, **message)

    def do_signal(self, signal: int, kind: int) -> None:
        assert self.local_host is not None
        self.local_host.signal(signal, kind)

    def do_leaves(self, leaves: bool) -> None:
        self.termination.allowed = leaves

    def do_end(self, end: float) -> None:
        self.end_ranks(end)
        self.send_records()
        self.send(ended=True)
        self.finished = True

    def end_ranks(self, grace: float) -> None:
        """End the ranks, the rank server, and all processes that they left."""
        self._stop_listening()
        local_host, server = self.local_host, self.server
        self.local_host = self.server = None  # a signal meanwhile calls this method again
        if local_host is not None and server is not None:
            with contextlib.suppress(KeyError):
                self.selector.unregister(local_host)
            server.end(grace)
        end_remaining_children()
        if self.folder is not None:
            job_folder.clear(self.folder)

    def _choose_record_target(self, record: Path, run: str) -> None:
        """Keep the records in the launcher's folder if it is shared, else send them."""
        assert self.folder is not None
        try:
            shared = job_folder.read_label(record).run == run
            with tempfile.TemporaryFile(dir=record):
                pass  # this node can write to it too
        except OSError:
            shared = False
        self.sends_records = not shared
        if self.sends_records:
            job_folder.send_on_clear(self.folder)
        else:
            job_folder.copy_on_clear(self.folder, record)

    def send_records(self) -> None:
        """Send the records that exist only on this node, and remove them in any case."""
        if not self.sends_records or self.folder is None:
            return
        self.sends_records, folder_to_send = False, self.folder / job_folder.TO_SEND
        try:
            for path in sorted(folder_to_send.rglob("rank-*")):
                name = str(path.relative_to(folder_to_send))
                data = read_regular(path, MAX_RECORD_BYTES, follow_links=False)
                for start in range(0, len(data), RECORD_CHUNK_BYTES):
                    piece = data[start : start + RECORD_CHUNK_BYTES]
                    last = start + RECORD_CHUNK_BYTES >= len(data)
                    self.send(piece, file=name, start=start, last=last)
        finally:
            job_folder.remove(self.folder)

    def _stop_listening(self) -> None:
        if self.listener is not None:
            for listening in self.listener.sockets.values():
                self.selector.unregister(listening)
            self.listener.close()
            self.listener = None

    def add_rank(self, rank: int, pipes: tuple[int, int, int]) -> None:
        for stream, pipe in enumerate(pipes, start=1):
            os.set_blocking(pipe, False)
            self.pipes[pipe] = (rank, stream)
            self.selector.register(pipe, selectors.EVENT_READ)

    def _forward_output(self, pipe: int) -> bool:
        """Send the launcher a rank's output. Return whether there may be more."""
        rank, stream = self.pipes[pipe]
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self.send(data, out=rank, stream=stream)
        if not data:
            self.selector.unregister(pipe)
            os.close(pipe)
            del self.pipes[pipe]
        return bool(data)

    def _report_exits(self) -> None:
        """Report ranks that ended, after their last output."""
        assert self.local_host is not None
        was_ready = self.local_host.ready
        for rank, status, at in self.local_host.take_exits():
            for pipe in [p for p, (writer, _) in self.pipes.items() if writer == rank]:
                for _ in range(256):  # a process that the rank left may write forever
                    if not self._forward_output(pipe):
                        break
            self.send(died=rank, status=status, at=at, why=self.local_host.exit_reason(rank))
        if self.local_host.ready and not was_ready:
            self.send(ready=True)
        if self.local_host.server_ended:
            self.selector.unregister(self.local_host)
            self.send(mistake="the rank server, from which ranks are forked, has ended")


check_job = check  # ``check`` is a parameter name in do_check


def _open_channel() -> Channel:
    """Connect to the launcher, over TCP or by standard input and output."""
    parser = argparse.ArgumentParser(prog="paceline.launch.host_agent", description=__doc__)
    parser.add_argument("--connect", help="addresses of the launcher: ADDRESS,PORT;...")
    addresses = parser.parse_args().connect
    null_fd = os.open(os.devnull, os.O_RDWR)
    if addresses is None:
        read_fd, write_fd = os.dup(0), os.dup(1)
        os.dup2(null_fd, 0)
        os.dup2(2, 1)
        channel = Channel(read_fd, write_fd)
        os.write(write_fd, START_MARKER)
        return channel
    os.dup2(null_fd, 0)
    secret = os.environ.pop("PACELINE_SECRET", "")
    if not secret:
        sys.exit("paceline: PACELINE_SECRET is not set on this node. HINT: --launcher ssh")
    try:
        return connect_to_launcher(addresses, secret)
    except LauncherNotFoundError as error:
        hint = "end other programs that use the launcher's port; --launcher ssh needs no port"
        if not error.dropped:
            hint = "check the firewalls; GLOO_SOCKET_IFNAME=NAME selects an interface"
        host = socket.gethostname()
        sys.exit(f"paceline: {host} can't reach the launcher. Tried {error}. HINT: {hint}")


def _raise_on_signal(signal_number: int, _: Any) -> NoReturn:
    signal.signal(signal_number, signal.SIG_IGN)
    name = signal.Signals(signal_number).name
    raise LauncherLostError(
        f"was ended together with the agent of its node by {name}, for example because the job "
        "was cancelled",
        signal_number,
    )


def _run_agent() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    for signal_number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signal_number, signal.SIG_IGN)
    prctl(SUBREAPER, 1)
    started = launched_by(dict(os.environ))
    agent_number = started.rank if started is not None else 0
    agent = HostAgent(_open_channel())
    for signal_number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            signal_number,
            lambda kind, _: agent.termination.defer(kind) or _raise_on_signal(kind, _),
        )
    try:
        agent.serve(agent_number)
        return 0
    except LauncherLostError as end:
        with contextlib.suppress(LauncherLostError):
            agent.send(leaving=end.reason, signal=end.signal_number)
        agent.end_ranks(2.0)
        with contextlib.suppress(LauncherLostError):
            agent.send_records()
        return 1
    except ForkedRankServer:
        raise
    except BaseException:
        agent.end_ranks(2.0)
        raise


def main() -> None:
    """Run the agent, and in processes forked from it the rank server and the ranks."""
    from .single_node import run_rank_server

    try:
        code = _run_agent()
    except ForkedRankServer as forked:
        job = forked
    else:
        sys.stderr.flush()
        os._exit(code)  # nothing to tear down; torch would take half a second
    # not in the handler: else a rank's exceptions would have this one as their context
    run_rank_server(job)


if __name__ == "__main__":
    main()
