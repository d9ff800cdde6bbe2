"""Serve the live records of a job on several hosts to processes that show them.

The launcher listens on an abstract Unix socket (no file, so nothing needs cleaning up) for
processes of the same user on its host. For each query it asks every host's agent for the tails of
its ring files, and forwards what arrives within a time limit: hosts that do not answer are named.
Each visitor has its own thread, so that a slow one delays no other; the threads that read the
hosts' channels only store the answers here.
"""

import contextlib
import errno
import os
import re
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from ...record.ring.ring import EVENT, HEADER_BYTES
from ...record.ring.tail import Tail, read_tails
from ...security.text import printable_tree
from .. import job_folder
from ..channel import Channel, InvalidMessageError
from .rank_stacks import ask as ask_for_stacks

ANSWER_TIMEOUT_S = 2.0  # for the answers of all hosts
SILENT_HOST_TIMEOUT_S = 1.0  # part of it in which hosts that were silent before are awaited too
STACK_TIMEOUT_S = 2.0  # added if ranks are asked for stacks
VISITOR_TIMEOUT_S = 10.0  # for a visitor to send its query, and to read a part of the answer
MAX_VISITORS = 8  # at a time
LAUNCHER_TIMEOUT_S = 5.0
MAX_TRIES, RETRY_INTERVAL_S = 5, 0.3
UNIX_SOCKETS_FILE = Path("/proc/net/unix")
NO_DESCRIPTOR_WAIT_S = 0.5  # when no file descriptor is free
MAX_EVENTS = 1 << 16
MAX_TAIL_BYTES = HEADER_BYTES + MAX_EVENTS * EVENT.size
_PEER = struct.Struct("iII")  # pid, uid, gid
Message = tuple[dict[str, Any], bytes]


class Host(Protocol):
    """The part of ``remote_host.RemoteHost`` that is needed here."""

    name: str
    on_tail: Any  # called with the answers of the host's agent

    def send_if_ready(self, **message: Any) -> bool: ...
    @property
    def failure(self) -> str: ...
    @property
    def is_silent(self) -> bool: ...


def local_tails(folder: Path, max_events: int, stacks: bool = False) -> list[Tail]:
    """Return the tails of the ring files in a job's folder on this host.

    Args:
        max_events: Newest events of each rank.
        stacks: Also ask the ranks for their stacks; a rank without a ring file then has a tail
            without data.
    """
    stack_by_rank = ask_for_stacks(folder) if stacks else {}
    tails = read_tails(folder, max_events, job_folder.read_attempt(folder))
    tails = [replace(tail, stack=stack_by_rank.get(rank_of(tail), "")) for tail in tails]
    silent = stack_by_rank.keys() - {rank_of(tail) for tail in tails}
    return tails + [
        Tail(f"rank-{rank}", 0, "", b"", stack_by_rank[rank]) for rank in sorted(silent)
    ]


def rank_of(tail: Tail) -> int:
    return int(tail.name.split("-")[1])


def local_snapshot(folder: Path, max_events: int) -> "JobSnapshot":
    """Return a snapshot, with stacks, of a job on this host alone."""
    return JobSnapshot(local_tails(folder, max_events, stacks=True), [], False, {})


def tail_messages(folder: Path | None, max_events: int, stacks: bool) -> Iterator[Message]:
    """Yield the tails of this host's ring files, one per message, then a message with "done"."""
    if folder is not None:
        for tail in local_tails(folder, max_events, stacks):
            description = {"ring": tail.name, "now": tail.now, "process": tail.process}
            description["stack"] = tail.stack
            yield description, zlib.compress(tail.data, 1)
    yield {"done": True}, b""


class LiveRecordServer:
    """Answer the queries of visitors in the launcher, until it is closed.

    Args:
        about: Description of the job for visitors.

    Attributes:
        ending: Whether the hosts can no longer be asked.
    """

    def __init__(self, run: str, hosts: Sequence[Host], about: dict[str, Any]) -> None:
        self._hosts, self._job_description = dict(enumerate(hosts)), about
        self.ending = False
        self._query_lock = threading.Lock()  # one query to the hosts at a time
        self._changed = threading.Condition()
        self._query_numbers = count(1)
        self._query_number = 0
        self._answers: list[Message] = []
        # indices of hosts that have not answered an earlier query
        self._unanswered_hosts: set[int] = set()
        self._visitors = threading.Semaphore(MAX_VISITORS)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        for host_index, host in enumerate(hosts):
            host.on_tail = partial(self._take_answer, host_index)
        try:
            self._socket.bind(_address(run))
            self._socket.listen(MAX_VISITORS)
        except OSError:  # the job runs without live views
            self._socket.close()
            return
        threading.Thread(target=self._accept, daemon=True).start()

    def replace(self, host_index: int, host: Host) -> None:
        """Use another connection to the host from now on, or the first one to a new host."""
        host.on_tail = partial(self._take_answer, host_index)
        with self._changed:
            self._hosts[host_index] = host
            self._unanswered_hosts.discard(host_index)

    def close(self) -> None:
        """Stop answering; visitors then see that the job has ended."""
        self.ending = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                visitor, _ = self._socket.accept()
            except OSError as error:
                if self.ending or error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    return
                time.sleep(NO_DESCRIPTOR_WAIT_S)  # the process has no free file descriptor for now
                continue
            if not _is_same_user(visitor) or not self._visitors.acquire(blocking=False):
                visitor.close()
                continue
            threading.Thread(target=self._serve_visitor, args=(visitor,), daemon=True).start()

    def _serve_visitor(self, visitor: socket.socket) -> None:
        try:
            channel = _channel(visitor, VISITOR_TIMEOUT_S)
            for message, _ in channel.receive() or []:
                max_events = min(max(int(message["tails"]), 0), MAX_EVENTS)
                for answer, raw in self._collect(max_events, False):
                    channel.send(answer, raw)
        except (OSError, InvalidMessageError, KeyError, TypeError, ValueError, OverflowError):
            pass  # the visitor is gone, or is not Paceline
        finally:
            visitor.close()
            self._visitors.release()

    def snapshot(self, max_events: int) -> "JobSnapshot":
        """Return a snapshot for the launcher itself, with the ranks' stacks."""
        return snapshot_from_messages(self._collect(max_events, True))

    def _collect(self, max_events: int, stacks: bool) -> list[Message]:
        """Return the answers of all hosts; the last message names hosts without an answer."""
        if self.ending or max_events == 0:
            return [self._end_message([], self.ending)]
        with self._query_lock:
            with self._changed:
                self._query_number, self._answers = next(self._query_numbers), []
                asked = set(self._hosts) - self._unanswered_hosts
                self._unanswered_hosts |= asked
            query = {"tails": self._query_number, "most": max_events, "stacks": stacks}
            for host_index in sorted(asked):
                if not self._hosts[host_index].send_if_ready(**query):
                    asked.discard(host_index)
                    with self._changed:
                        self._unanswered_hosts.discard(host_index)
            with self._changed:
                timeout_s = ANSWER_TIMEOUT_S + (STACK_TIMEOUT_S if stacks else 0.0)
                # A launcher that was suspended has received nothing until it reads what has come
                # meanwhile.
                if not self._changed.wait_for(
                    partial(self._all_answered, asked, False), SILENT_HOST_TIMEOUT_S
                ):
                    rest_s = timeout_s - SILENT_HOST_TIMEOUT_S
                    self._changed.wait_for(partial(self._all_answered, asked, True), rest_s)
                silent = [
                    host.name
                    for host_index, host in self._hosts.items()
                    if host_index not in asked or host_index in self._unanswered_hosts
                ]
                answers, self._answers = self._answers, []
        return [*answers, self._end_message(silent, False)]

    def _end_message(self, silent: list[str], ending: bool) -> Message:
        """Return the last message of an answer."""
        end = {"end": True, "silent": silent, "ending": ending}
        return {**end, **self._job_description}, b""

    def _all_answered(self, asked: set[int], skip_silent: bool) -> bool:
        """Whether no answer is awaited; ``skip_silent``: except of hosts that have long been
        silent.
        """
        awaited = [self._hosts[host_index] for host_index in asked & self._unanswered_hosts]
        return self.ending or all(
            host.failure or (skip_silent and host.is_silent) for host in awaited
        )

    def _take_answer(self, host_index: int, message: dict[str, Any], raw: bytes) -> None:
        """Store an answer. Called by the host's reader thread: must return at once."""
        with self._changed:
            if "done" in message:
                self._unanswered_hosts.discard(host_index)
                self._changed.notify_all()
            elif message.get("tails") == self._query_number:
                self._answers.append((message, raw))


@dataclass(frozen=True)
class JobSnapshot:
    """The state of a job at one time.

    Attributes:
        tails: Tails of the ranks' records.
        silent_hosts: Names of hosts that have not answered.
        ending: Whether the job is ending.
        job: Description of the job by its launcher.
    """

    tails: list[Tail]
    silent_hosts: list[str]
    ending: bool
    job: dict[str, Any]


def query_launcher(run: str, max_events: int) -> JobSnapshot | None:
    """Ask the launcher of a job on several hosts; None if it is not running.

    Raises:
        ValueError: It is running and does not answer.
    """
    for _ in range(MAX_TRIES):
        try:
            return _query_launcher_once(run, max_events)
        except BusyError:
            time.sleep(RETRY_INTERVAL_S)
        except ConnectionRefusedError:
            return None
    raise ValueError(_LAUNCHER_SILENT)


class UnreachableError(ValueError):
    """A launcher's socket accepts no connection; the name may belong to another user's socket."""


class BusyError(Exception):
    """The launcher has closed the connection: it has too many visitors, or it ends."""


def _query_launcher_once(run: str, max_events: int) -> JobSnapshot | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(LAUNCHER_TIMEOUT_S)
        try:
            connection.connect(_address(run))
        except ConnectionRefusedError:
            raise
        except OSError:  # its queue is full: its owner can't be determined
            raise UnreachableError(_LAUNCHER_SILENT) from None
        if not _is_same_user(connection):
            return None
        return _exchange(_channel(connection, LAUNCHER_TIMEOUT_S), max_events)


_LAUNCHER_SILENT = (
    "the launcher of the job does not answer. HINT: check whether it is stopped (Ctrl-Z), or "
    "whether many paceline top run"
)


def snapshot_from_messages(messages: list[Message]) -> JobSnapshot:
    """Build the snapshot from a whole answer; its last message is the end."""
    *answers, (end, _) = messages
    tails = [
        Tail(
            description["ring"],
            description["now"],
            description["process"],
            _decompress_tail(raw),
            description["stack"],
        )
        for description, raw in printable_tree(answers)
    ]
    end = printable_tree(end)
    return JobSnapshot(tails, end["silent"], end["ending"], end)


def _decompress_tail(raw: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    data = unpacking.decompress(raw, MAX_TAIL_BYTES)
    if unpacking.unconsumed_tail:
        raise ValueError(f"a tail of more than {MAX_TAIL_BYTES:,} bytes")
    return data


def _exchange(channel: Channel, max_events: int) -> JobSnapshot:
    found: list[Message] = []
    started = time.monotonic()
    try:
        channel.send({"tails": max_events})
        while (messages := channel.receive()) is not None:
            found += messages
            if found and "end" in found[-1][0]:
                return snapshot_from_messages(found)
    except (OSError, InvalidMessageError, zlib.error):
        pass
    if time.monotonic() - started > LAUNCHER_TIMEOUT_S - 1.0:
        raise ValueError(_LAUNCHER_SILENT)
    raise BusyError


def running_launchers() -> list[str]:
    """Return the names of this user's jobs on several hosts whose launcher runs on this host."""
    name = re.compile(rb" @%s([0-9a-zA-Z_-]+)\n" % _prefix().encode())
    try:
        # any user can give a socket a name that is no text
        with UNIX_SOCKETS_FILE.open("rb") as lines:
            found = {match[1].decode() for line in lines if (match := name.search(line))}
    except OSError:
        return []
    return sorted(found)


def _prefix() -> str:
    return f"paceline-live-{os.getuid()}-"


def _address(run: str) -> str:
    return "\0" + _prefix() + run


def _channel(connection: socket.socket, timeout_s: float) -> Channel:
    """Return the channel of a connection on which each read and write has a time limit."""
    connection.settimeout(None)
    timeout = struct.pack("ll", int(timeout_s), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, timeout)
    return Channel(connection.fileno(), connection.fileno())


def _is_same_user(connection: socket.socket) -> bool:
    """Whether the other side belongs to the same user."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(peer)[1] == os.geteuid())
