"""The agent of one host of a job on several: ``python -m paceline.launch.host_agent``.

It does what the launcher tells it through a channel: checks that the job can run here, forks the
rank server, starts and signals ranks, passes on what they write and how they end. When the
channel ends, for whatever reason, it ends the ranks, keeps their records, and ends itself.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from ..cluster.rank_identity import launched_by
from ..comm.reachable_address import Listener, try_all, variables
from ..record.ring.tail import MAX_RECORD_BYTES
from ..security.files import read_regular
from .affinity import bind_ranks
from .channel import BEGIN, BrokenError, Channel
from .job import Job, check, preloads
from .linux_prctl import SUBREAPER, prctl
from .monitor import live_records
from .monitor.interrupt import Patience
from .ranks.fork_server import end_children
from .ranks.framework_variables import free_ports
from .ranks.local_host import Here, InServer, Server, start_server
from .records import job_folder
from .remote.agent_lock import claim
from .remote.connect_back import LauncherNotFoundError, dial
from .remote.handshake import hello

# Without a word from the launcher: it or the network is gone. Longer than a launcher that is
# stopped for a while (Ctrl-Z).
SILENCE = 900.0  # seconds
PIECE = 4 << 20  # bytes of a record's file in one message


class GoneError(Exception):
    """The launcher has gone, or a signal (its number) asks this agent to end."""

    def __init__(self, told: str, number: int = signal.SIGKILL) -> None:
        super().__init__(told)
        self.told, self.number = told, int(number)


class OnHost:
    """One agent. Each message of the launcher is a method: ``do_`` and the message's first key."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.job: Job | None = None
        self.here: Here | None = None
        self.server: Server | None = None
        self.listener: Listener | None = None
        self.claimed: socket.socket | None = None
        self.folder: Path | None = None
        self.sends = False  # the records are not in a folder that the launcher sees, too
        self.pipes: dict[int, tuple[int, int]] = {}  # descriptor -> rank, stream
        self.selector = selectors.DefaultSelector()
        self.selector.register(channel, selectors.EVENT_READ)
        self.heard = time.monotonic()
        self.over = False
        self.patience = Patience()

    def serve(self, place: int) -> None:
        """Until the launcher says that it is over. Raises GoneError without that.

        place: which of the agents this is, as the tool that has started them numbers them.
        """
        self.say(place=place)
        self.say(hello=hello())
        while not self.over:
            for key, _ in self.selector.select(1.0):
                self._ready(key.fileobj)
            if self.patience.news():
                self.say(ending=True)
            if self.patience.over:
                _ended(signal.SIGTERM, None)
            if time.monotonic() - self.heard > SILENCE:
                raise GoneError(f"the launcher has said nothing for {SILENCE:.0f} s")

    def _ready(self, source: Any) -> None:
        if source is self.channel:
            try:
                messages = self.channel.take()
            except BrokenError as error:
                raise GoneError(f"the launcher sent {error}") from None
            if messages is None:
                raise GoneError("the connection to the launcher has ended")
            self.heard = time.monotonic()
            for message, _ in messages:
                self._do(message)
        elif source is self.here:
            self._tell_deaths()
        elif source in self.pipes:
            self._pass_on(source)
        elif self.listener is not None:
            self.listener.answer(source)

    def _do(self, message: dict[str, Any]) -> None:
        try:
            getattr(self, "do_" + next(iter(message)))(**message)
        except ValueError as mistake:
            self.say(mistake=str(mistake))
        except GoneError:
            raise
        except Exception as error:  # a torch that can't be imported, say: the launcher tells it
            self.say(mistake=f"{type(error).__name__}: {error}")

    def say(self, raw: bytes = b"", **message: Any) -> None:
        try:
            self.channel.send(message, raw)
        except OSError:
            raise GoneError("the connection to the launcher has ended") from None

    # what the launcher asks

    def do_ping(self, ping: float) -> None:
        moved = asdict(self.here.progress()) if self.here is not None else None
        self.say(pong=ping, at=time.monotonic(), progress=moved)

    def do_check(self, check: dict[str, Any], environment: dict[str, str], folder: str) -> None:
        """Whether the job can run here. ``check``: of the Job, its ranks those of this host."""
        os.environ.update(environment)
        try:
            os.chdir(folder)
        except OSError as error:
            raise ValueError(
                f"{folder}: {error.strerror}. HINT: the working directory must be there on every "
                "host: a shared file system, or the same path"
            ) from None
        self.job = Job(**{**check, "record": None, "summary": None})
        self.source, self.places = check_job(self.job), bind_ranks.places(self.job)
        self.say(fits=True)

    def do_listen(self, listen: str | None) -> None:
        """Listen where other hosts may reach this one."""
        self.listener = Listener(listen)
        for listening in self.listener.sockets.values():
            self.selector.register(listening, selectors.EVENT_READ)
        self.say(listening=self.listener.offer())

    def do_reach(self, reach: dict[str, dict[str, Any]]) -> None:
        """Try to reach other hosts by each of their addresses."""
        offers = {int(host): offer for host, offer in reach.items()}
        self.say(reached=try_all(offers, self.listener))

    def do_begin(
        self, begin: dict[str, str], place: int, interface: str, address: str, record: str | None
    ) -> None:
        """Import torch and fork the rank server. begin: variables of every rank. place: of this
        host among the job's. "ready" is said once the server has imported what the ranks need."""
        assert self.job is not None
        self._stop_listening()
        self.claimed = claim(begin["PACELINE_RUN"], place)
        own = bind_ranks.variables_of_all(self.job, self.places)
        self.folder = job_folder.job_folder()
        job_folder.introduce(self.folder, [self.job.name, *self.job.args], begin["PACELINE_RUN"])
        if record is not None:
            self._promise(Path(record), begin["PACELINE_RUN"])
        environment = {**os.environ, **begin, "PACELINE_RECORD": str(self.folder)}
        environment.pop("PACELINE_SECRET", None)
        environment = {**variables(interface), **environment}
        ours = [*self.channel.descriptors, *([self.claimed.fileno()] if self.claimed else [])]
        self.server = start_server(self.folder, preloads(self.job, self.source), ours)
        self.here = Here(self.server, environment, self.places, own, address, self.job.smt)
        self.here.show(self)
        self.selector.register(self.here, selectors.EVENT_READ)  # which says when it is ready

    def do_store(self, store: int | None) -> None:
        assert self.here is not None
        if store is None:
            self.here.close_store()
            return
        address, port = self.here.open_store(store)
        self.say(store=port, address=address)

    def do_ports(self, ports: int) -> None:
        self.say(ports=free_ports(ports))

    def do_start(self, start: int, local_rank: int, variables: dict[str, str]) -> None:
        assert self.here is not None
        try:
            self.here.start(start, local_rank, variables)
        except (ValueError, OSError, RuntimeError) as error:
            self.say(died=start, status=1, at=time.monotonic(), why=f"was not started: {error}")

    def do_bindings(self, bindings: bool) -> None:
        assert self.here is not None
        self.say(bindings=self.here.bindings())

    def do_tails(self, tails: int, most: int, stacks: bool) -> None:
        for message, raw in live_records.answers(self.folder, most, stacks):
            self.say(raw, tails=tails, **message)

    def do_signal(self, signal: int, kind: int) -> None:
        assert self.here is not None
        self.here.signal(signal, kind)

    def do_leaves(self, leaves: bool) -> None:
        self.patience.granted = leaves

    def do_end(self, end: float) -> None:
        """All is over: end what is left, keep the records, and say so."""
        self.finish(end)
        self.send_kept()
        self.say(ended=True)
        self.over = True

    # inside

    def finish(self, grace: float) -> None:
        """End the ranks, and the rank server with all that they left."""
        self._stop_listening()
        here, server = self.here, self.server
        self.here = self.server = None  # a signal meanwhile comes here again
        if here is not None and server is not None:
            with contextlib.suppress(KeyError):
                self.selector.unregister(here)
            server.end(grace)
        end_children(0.0)  # nobody, unless the rank server itself was killed
        if self.folder is not None:
            job_folder.clear(self.folder)

    def _promise(self, record: Path, run: str) -> None:
        """Keep the records in the launcher's folder if it is the same here, else send them."""
        assert self.folder is not None
        try:
            shared = job_folder.about(record).run == run
            with tempfile.TemporaryFile(dir=record):
                pass  # here it can be written, too
        except OSError:
            shared = False
        self.sends = not shared
        if self.sends:
            job_folder.promise_to_send(self.folder)
        else:
            job_folder.promise_to(self.folder, record)

    def send_kept(self) -> None:
        """Send the records that lie here only, and remove them, also where nobody takes them."""
        if not self.sends or self.folder is None:
            return
        self.sends, kept = False, self.folder / job_folder.TO_SEND
        try:
            for path in sorted(kept.rglob("rank-*")):
                name = str(path.relative_to(kept))
                data = read_regular(path, MAX_RECORD_BYTES, follow_links=False)
                for start in range(0, len(data), PIECE):
                    piece = data[start : start + PIECE]
                    last = start + PIECE >= len(data)
                    self.say(piece, file=name, start=start, last=last)
        finally:
            job_folder.remove(self.folder)

    def _stop_listening(self) -> None:
        if self.listener is not None:
            for listening in self.listener.sockets.values():
                self.selector.unregister(listening)
            self.listener.close()
            self.listener = None

    def adopt(self, rank: int, pipes: tuple[int, int, int]) -> None:
        """Read what a rank writes."""
        for stream, outlet in enumerate(pipes, start=1):
            os.set_blocking(outlet, False)
            self.pipes[outlet] = (rank, stream)
            self.selector.register(outlet, selectors.EVENT_READ)

    def _pass_on(self, pipe: int) -> bool:
        """What a rank has written; whether there may be more."""
        rank, stream = self.pipes[pipe]
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self.say(data, out=rank, stream=stream)
        if not data:
            self.selector.unregister(pipe)
            os.close(pipe)
            del self.pipes[pipe]
        return bool(data)

    def _tell_deaths(self) -> None:
        """A rank's last words come before its death."""
        assert self.here is not None
        was_ready = self.here.ready
        for rank, status, at in self.here.deaths():
            for pipe in [p for p, (writer, _) in self.pipes.items() if writer == rank]:
                for _ in range(256):  # a process that it left may go on writing for ever
                    if not self._pass_on(pipe):
                        break
            self.say(died=rank, status=status, at=at, why=self.here.why(rank))
        if self.here.ready and not was_ready:
            self.say(ready=True)
        if self.here.gone:
            self.selector.unregister(self.here)
            self.say(mistake="the process that ranks are forked from has ended")


check_job = check  # a message's name too


def _channel() -> Channel:
    """To the launcher: over TCP where it has given addresses, else standard input and output."""
    parser = argparse.ArgumentParser(prog="paceline.launch.host_agent", description=__doc__)
    parser.add_argument("--connect", help="addresses of the launcher: ADDRESS,PORT;...")
    wanted = parser.parse_args().connect
    null = os.open(os.devnull, os.O_RDWR)
    if wanted is None:
        inlet, outlet = os.dup(0), os.dup(1)
        os.dup2(null, 0)
        os.dup2(2, 1)
        channel = Channel(inlet, outlet)
        os.write(outlet, BEGIN)
        return channel
    os.dup2(null, 0)
    secret = os.environ.pop("PACELINE_SECRET", "")
    if not secret:
        sys.exit("paceline: the job's secret (PACELINE_SECRET) did not come to this host")
    try:
        return dial(wanted, secret)
    except LauncherNotFoundError as error:
        hint = "do other programs flood the launcher's port? --launcher ssh needs no port"
        if not error.dropped:
            hint = (
                "is there a firewall between the hosts? GLOO_SOCKET_IFNAME=NAME takes one interface"
            )
        host = socket.gethostname()
        sys.exit(f"paceline: {host} can't reach the launcher. Tried {error}. HINT: {hint}")


def _ended(number: int, _: Any) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    name = signal.Signals(number).name
    raise GoneError(f"was ended with its host's agent, by {name} (a cancelled job, say)", number)


def _work() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    prctl(SUBREAPER, 1)
    started = launched_by(dict(os.environ))
    place = started.rank if started is not None else 0
    agent = OnHost(_channel())
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda kind, _: agent.patience.take(kind) or _ended(kind, _))
    try:
        agent.serve(place)
        return 0
    except GoneError as end:
        with contextlib.suppress(GoneError):
            agent.say(leaving=end.told, signal=end.number)
        agent.finish(2.0)
        with contextlib.suppress(GoneError):
            agent.send_kept()
        return 1
    except InServer:
        raise
    except BaseException:
        agent.finish(2.0)
        raise


def main() -> None:
    """The agent, and in processes forked from it the rank server and the ranks."""
    from .single_node import serve

    try:
        code = _work()
    except InServer as forked:
        job = forked
    else:
        sys.stderr.flush()
        os._exit(code)  # nothing is left to tear down, and torch takes half a second for it
    serve(job)  # not in the handler: a rank's exceptions have no context of ours


if __name__ == "__main__":
    main()
