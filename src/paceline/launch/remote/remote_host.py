"""The launcher's connection to the agent on another node of the job."""

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...record.ring.ring import SIDECAR_SUFFIXES
from ...security.folders import NewFile, open_subfolder
from ...security.text import printable
from ..channel import Channel, InvalidMessageError
from ..monitor.output import RankOutput
from ..monitor.progress import ProgressReport

HEARTBEAT_INTERVAL_S = 5.0
# Then the node is considered lost. Heartbeats are counted instead of timed, so that a launcher that
# was suspended (Ctrl-Z) does not count its own absence.
MAX_MISSED_HEARTBEATS = 24
PROMPT_ANSWER_TIMEOUT_S = 60.0
SEND_LOCK_TIMEOUT_S = 0.1
RECORD_SUFFIXES = (".ring", *SIDECAR_SUFFIXES)


class HostTimeoutError(ValueError):
    """A host did not answer in time."""


class RemoteHost:
    """The launcher's connection to the agent on one node. Background threads read its messages and
    send heartbeats.

    Args:
        name: Name of the node.
        abort: Breaks a connection that the other end no longer reads.

    Attributes:
        address: Address by which the other nodes reach this one.
        ranks: Number of ranks of a host that joins a running job.
        run_id: Identifier of the job.
        record_folder: Folder for the record files that the node sends, or None.
        on_tail: Called with each message about the tail of a record; must return at once.
        termination_requested: Whether the node's scheduler has asked its agent to end.
        expects_heartbeats: Whether missed heartbeats mean that the node is lost; not while it
            imports torch.
        record_error: Why the node's records could not be kept, or "".
        heartbeat_interval_s: Seconds between two heartbeats.
    """

    def __init__(self, name: str, channel: Channel, abort: Callable[[], None]) -> None:
        self.name, self.address, self.ranks = name, "", 0
        self._abort = abort
        self.hello: dict[str, Any] = {}
        self._output: RankOutput | None = None
        self._peers: list[RemoteHost] = []  # all hosts of the job
        self.run_id = ""
        self.record_folder: Path | None = None
        self.on_tail: Callable[[dict[str, Any], bytes], None] = lambda message, raw: None
        self.termination_requested = False
        self.expects_heartbeats = False
        self._channel = channel
        self.record_error = ""
        self._incoming: tuple[Path, NewFile] | None = None  # record file that is being received
        self._answers: deque[dict[str, Any]] = deque()
        self._exits: deque[tuple[int, int, float]] = deque()
        self._changed = threading.Condition()
        self._running: set[int] = set()
        self._start_errors: dict[int, str] = {}  # of ranks that could not be started
        self._failure, self._exit_status_when_lost = "", -int(signal.SIGKILL)
        self._last_message_at = time.monotonic()
        self._missed_heartbeats, self._handling_messages = 0, False
        self._clock_offset_s = 0.0  # of the host's monotonic clock to this one's
        self._round_trip = float("inf")
        self._closing, self._close_once = False, threading.Lock()
        # The last report, when it came, and when it was requested.
        self._progress = (ProgressReport(), time.monotonic(), 0.0)
        self._last_start_at = 0.0  # when the last rank was started
        self.heartbeat_interval_s = HEARTBEAT_INTERVAL_S
        self._send_lock = threading.Lock()
        self._reader_done = threading.Event()  # set when nothing more comes
        threading.Thread(target=self._read_messages, daemon=True).start()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    # the Host protocol of ranks.host

    def set_output(self, output: RankOutput) -> None:
        self._output = output

    def set_peers(self, hosts: Sequence[Any]) -> None:
        self._peers = [host for host in hosts if isinstance(host, RemoteHost)]

    def open_store(self, port: int) -> tuple[str, int]:
        self.send(store=port)
        answer = self._prompt_answer("store")
        return str(answer["address"]), int(answer["store"])

    def close_store(self) -> None:
        self.send(store=None)

    def free_ports(self, count: int) -> list[int]:
        self.send(ports=count)
        return [int(port) for port in self._prompt_answer("ports")["ports"]]

    def bindings(self) -> dict[str, Any]:
        self.send(bindings=True)
        return dict(self._prompt_answer("bindings")["bindings"])

    def start(self, rank: int, local_rank: int, variables: dict[str, str]) -> None:
        started = int(variables["PACELINE_STARTED_NS"]) + int(self._clock_offset_s * 1e9)
        host_variables = {**variables, "PACELINE_STARTED_NS": str(started)}
        self._running.add(rank)
        self._start_errors.pop(rank, None)
        self._last_start_at = time.monotonic()
        self.send(start=rank, local_rank=local_rank, variables=host_variables)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def take_exits(self) -> Iterator[tuple[int, int, float]]:
        """Yield the ranks that ended since the last call; all ranks, if the host is lost."""
        while self._exits:
            rank, status, at = self._exits.popleft()
            self._running.discard(rank)
            yield rank, status, at
        if self._failure:
            for rank in sorted(self._running):
                self._running.discard(rank)
                yield rank, self._exit_status_when_lost, self._last_message_at

    def signal(self, rank: int, kind: int) -> None:
        self.send(signal=rank, kind=int(kind))

    def set_can_stop_early(self, can_stop_early: bool) -> None:
        self.send(leaves=can_stop_early)

    def progress(self) -> ProgressReport:
        """Return the progress of the host's ranks; time since its last report counts as idle."""
        report, received_at, requested_at = self._progress
        if (
            requested_at < self._last_start_at
        ):  # the report is of an earlier attempt, which may have hung
            report, received_at = ProgressReport(), self._last_start_at
        return replace(report, idle_s=report.idle_s + time.monotonic() - received_at)

    @property
    def is_silent(self) -> bool:
        """Whether no message has come for three heartbeat intervals."""
        return time.monotonic() - self._last_message_at > 3 * self.heartbeat_interval_s

    def give_up(self) -> None:
        """Consider the host lost because it does not answer."""
        self._mark_lost("was lost with its node, which does not answer")
        self._abort()

    def exit_reason(self, rank: int) -> str:
        """Return what the host has to do with a rank's exit, or ""."""
        return self._start_errors.get(rank, self._failure)

    @property
    def failure(self) -> str:
        """What happened to the host, if it can no longer be reached, or ""."""
        return self._failure

    def to_local_time(self, at: float) -> float:
        """Convert a time of the host's monotonic clock to this host's."""
        return at - self._clock_offset_s

    # further requests of the launcher

    def send(self, **message: Any) -> None:
        """Send a message. Errors are not raised: ``failure`` says what happened."""
        try:
            with self._send_lock:
                self._channel.send(message)
        except OSError as error:
            self._connection_broke(error)

    def send_if_ready(self, **message: Any) -> bool:
        """Send a short message if that does not block. Return whether it was sent."""
        if self._failure or not self._send_lock.acquire(timeout=SEND_LOCK_TIMEOUT_S):
            return False
        try:
            if not self._channel.has_room():
                return False
            self._channel.send(message)
        except OSError as error:
            self._connection_broke(error)
            return False
        finally:
            self._send_lock.release()
        return True

    def wait_for_answer(self, key: str, seconds: float) -> dict[str, Any]:
        """Return the next answer that has ``key``.

        Raises:
            ValueError: The agent reports a mistake, or the host is lost.
            HostTimeoutError: No such answer came within ``seconds``.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                if (message := self._next_answer(key)) is not None:
                    return message
                left = deadline - time.monotonic()
                if left <= 0:
                    raise HostTimeoutError(
                        f"{self.name} did not answer within {seconds:.0f} s ({key}). HINT: check "
                        "whether the node is overloaded, or its file system slow"
                    )
                self._changed.wait(min(left, 0.5))

    def poll_answer(self, key: str) -> dict[str, Any] | None:
        """Return the next answer that has ``key``, or None if it has not come yet.

        Raises:
            ValueError: Same as for ``wait_for_answer``, without the timeout.
        """
        with self._changed:
            return self._next_answer(key)

    def _next_answer(self, key: str) -> dict[str, Any] | None:
        for message in self._answers:
            if key in message or "mistake" in message:
                self._answers.remove(message)
                if "mistake" in message:
                    raise ValueError(f"{self.name}: {message['mistake']}")
                return message
        if self._failure:
            raise ValueError(f"{self.name} {self._failure}")
        return None

    def _prompt_answer(self, key: str) -> dict[str, Any]:
        """Return an answer that takes no time to compute; a host that does not send it is lost."""
        try:
            return self.wait_for_answer(key, PROMPT_ANSWER_TIMEOUT_S)
        except HostTimeoutError:
            self.give_up()
            raise

    def wait_until_closed(self, seconds: float) -> None:
        """Wait for the records that a host sends before it closes the connection."""
        self._reader_done.wait(seconds)

    def close(self) -> None:
        # only once: the descriptors may be reused afterwards
        if self._close_once.acquire(blocking=False):
            self._closing = True
            self._channel.close()

    # background threads

    def _read_messages(self) -> None:
        try:
            while (messages := self._channel.receive()) is not None:
                self._last_message_at = time.monotonic()
                # handling messages may take long: that is not the host's silence
                self._handling_messages = True
                for message, raw in messages:
                    self._handle_message(message, raw)
                self._handling_messages, self._missed_heartbeats = False, 0
            self._mark_lost("was lost with its node: its agent has ended, or the connection broke")
        except InvalidMessageError as error:
            self._mark_lost(f"was lost with its node: the agent sent {error}")
        except Exception as error:  # for example a full disk: nothing else would report it
            reason = f"{type(error).__name__}: {error}"
            self._mark_lost(f"was lost: a message of its node could not be handled ({reason})")
        finally:
            self._drop_incoming()
            self._reader_done.set()

    def _handle_message(self, message: dict[str, Any], raw: bytes) -> None:
        if "out" in message:
            assert self._output is not None
            if message["out"] not in self._output.tails:
                return  # output of an earlier attempt that had more ranks
            self._output.take(message["out"], message["stream"], raw)
        elif "died" in message:
            if message["why"]:
                self._start_errors[message["died"]] = message["why"]
            self._exits.append(
                (message["died"], message["status"], self.to_local_time(message["at"]))
            )
        elif "ending" in message:
            self.termination_requested = True
        elif "tails" in message:
            self.on_tail(message, raw)
        elif "whose" in message:
            self._ask_owner(message)
        elif "say" in message:
            assert self._output is not None
            self._output.say(message["say"])
        elif "owned" in message:
            self._asking_host(message["asker"]).send(
                admit=message["owned"], is_of_user=message["is_of_user"]
            )
        elif "pong" in message:
            self._update_clock_offset(message["pong"], message["at"])
            if message["progress"] is not None:
                now = time.monotonic()
                self._progress = (ProgressReport(**message["progress"]), now, message["pong"])
        elif "file" in message:
            self._store_record_chunk(message["file"], message["start"], message["last"], raw)
        elif "warning" in message:
            text = printable(f"{self.name}: {message['warning']}")
            sys.stderr.write(f"paceline: warning: {text}\n")
        elif "leaving" in message:
            self._exit_status_when_lost = -int(message["signal"])
            self._mark_lost(message["leaving"])
        else:
            with self._changed:
                self._answers.append(message)
                self._changed.notify_all()

    def _ask_owner(self, question: dict[str, Any]) -> None:
        """Ask the host with the address of a connection to the store whether it is of the job's
        user there. A host that knows no such connection does not answer if several were asked.
        """
        address = question["peer"][0]
        peers = [host for host in self._peers if host is not self]
        owners = [host for host in peers if address in host.hello["addresses"]]
        # Hosts name one address of each interface: the connection may come from another one.
        for host in owners or peers:
            host.send(
                owner=question["whose"],
                asker=self.name,
                peer=question["peer"],
                own=question["own"],
                is_only=bool(owners),
            )

    def _asking_host(self, name: str) -> "RemoteHost":
        return next((host for host in self._peers if host.name == name), self)

    def _update_clock_offset(self, sent_at: float, answered_at: float) -> None:
        """Estimate the clock offset from the exchange with the shortest round trip."""
        now = time.monotonic()
        if now - sent_at < self._round_trip:
            self._round_trip, self._clock_offset_s = (
                now - sent_at,
                answered_at - (sent_at + now) / 2,
            )

    def _store_record_chunk(self, name: str, start: int, last: bool, raw: bytes) -> None:
        """Write a chunk of a record file. Names that Paceline does not generate are ignored."""
        parts = name.split("/")
        plain = all(part and part.strip(".") and part[0] != "." for part in parts)
        if (
            self.record_folder is None
            or len(parts) > 2
            or not plain
            or not name.endswith(RECORD_SUFFIXES)
        ):
            return
        try:
            self._write(self.record_folder / name, start, last, raw)
        except OSError as error:  # for example a full disk
            self._drop_incoming()
            if not self.record_error:
                self.record_error = error.strerror or str(error)
                sys.stderr.write(
                    f"paceline: the record of {self.name} could not be written to "
                    f"{self.record_folder} ({self.record_error}), and is lost. HINT: use "
                    "--record with a folder on a disk with free space\n"
                )

    def _write(self, path: Path, start: int, last: bool, raw: bytes) -> None:
        assert self.record_folder is not None
        if start == 0:
            self._drop_incoming()
            self.record_folder.mkdir(parents=True, exist_ok=True)
            if path.parent != self.record_folder:
                os.close(open_subfolder(path.parent))  # must not be a link
            self._incoming = (path, NewFile(path))
        if self._incoming is None or self._incoming[0] != path:
            return  # its beginning was lost, or could not be written
        file = self._incoming[1]
        file.write(raw)
        if last:
            file.commit()
            self._incoming = None

    def _drop_incoming(self) -> None:
        """Remove a file that was not completed."""
        if self._incoming is not None:
            self._incoming[1].discard()
            self._incoming = None

    def _send_heartbeats(self) -> None:
        """Send heartbeats; at first often, to compare the clocks."""
        wait = 0.02
        while not self._closing and not self._failure:
            if (
                self._missed_heartbeats > MAX_MISSED_HEARTBEATS
                and self.expects_heartbeats
                and not self._handling_messages
            ):
                self._mark_lost(
                    f"was lost with its node: it did not answer {MAX_MISSED_HEARTBEATS} "
                    f"heartbeats in {MAX_MISSED_HEARTBEATS * self.heartbeat_interval_s:.0f} s"
                )
                self._abort()
                return
            self._missed_heartbeats += wait >= self.heartbeat_interval_s
            # A host that does not read must not block this thread: send only where there is room.
            self.send_if_ready(ping=time.monotonic())
            time.sleep(wait)
            wait = min(wait * 2, self.heartbeat_interval_s)

    def _connection_broke(self, error: OSError) -> None:
        self._mark_lost(f"was lost with its node: the connection broke ({error.strerror})")

    def _mark_lost(self, reason: str) -> None:
        if not self._closing and not self._failure:
            with self._changed:
                self._failure = reason
                self._changed.notify_all()
