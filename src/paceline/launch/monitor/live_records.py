"""The rings of a job on several hosts, for whoever wants to see them while it runs.

The launcher listens on an abstract Unix socket (nothing lies in a file system, nothing is to be
cleaned up) to processes of the same user on its host. For each question it asks every host's
agent for the tails of its rings, and passes on what comes within a time: a host that is silent is
named, and the others are shown. Each visitor has a thread of its own, so that a slow one holds up
nobody; what reads the hosts' channels only puts their answers down here.
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
from ..channel import BrokenError, Channel
from ..records import job_folder
from .rank_stacks import ask as ask_for_stacks

ANSWER_SECONDS = 2.0  # for all hosts together
SOON_SECONDS = 1.0  # of those, also for hosts that have been silent before
STACK_SECONDS = 2.0  # more, where ranks are asked as well
VISITOR_SECONDS = 10.0  # to say what he wants, and to take a piece of the answer
VISITORS = 8  # at a time
PATIENCE_SECONDS = 5.0  # of a visitor
TRIES, BUSY_SECONDS = 5, 0.3
SOCKETS = Path("/proc/net/unix")
NO_ROOM_S = 0.5  # without accepting visitors
MOST_EVENTS = 1 << 16
MAX_TAIL_BYTES = HEADER_BYTES + MOST_EVENTS * EVENT.size
_PEER = struct.Struct("iII")  # pid, uid, gid
Message = tuple[dict[str, Any], bytes]


class Host(Protocol):
    """What this needs of ``there.There``."""

    name: str
    on_tail: Any  # called with what the host's agent answers

    def offer(self, **message: Any) -> bool: ...
    @property
    def trouble(self) -> str: ...
    @property
    def silent(self) -> bool: ...


def here(folder: Path, most: int, stacks: bool = False) -> list[Tail]:
    """The tails of the rings in a job's folder on this host; with the ranks' stacks, if wanted:
    a rank without a ring has a tail without data then."""
    asked = ask_for_stacks(folder) if stacks else {}
    found = read_tails(folder, most, job_folder.noted_attempt(folder))
    found = [replace(one, stack=asked.get(rank_of(one), "")) for one in found]
    silent = asked.keys() - {rank_of(one) for one in found}
    return found + [Tail(f"rank-{rank}", 0, "", b"", asked[rank]) for rank in sorted(silent)]


def rank_of(tail: Tail) -> int:
    return int(tail.name.split("-")[1])


def look_here(folder: Path, most: int) -> "Seen":
    """``Live.look`` for a job on this host alone."""
    return Seen(here(folder, most, stacks=True), [], False, {})


def answers(folder: Path | None, most: int, stacks: bool) -> Iterator[Message]:
    """On the host: the tails of its rings, each in a message; then one that says it is done."""
    if folder is not None:
        for found in here(folder, most, stacks):
            about = {"ring": found.name, "now": found.now, "process": found.process}
            about["stack"] = found.stack
            yield about, zlib.compress(found.data, 1)
    yield {"done": True}, b""


class Live:
    """In the launcher: answers visitors until it is closed.

    about: what visitors are told of the job. ``ending``: the hosts can't be asked any more.
    """

    def __init__(self, run: str, hosts: Sequence[Host], about: dict[str, Any]) -> None:
        self._hosts, self._about = list(hosts), about
        self.ending = False
        self._turn = threading.Lock()  # one question to the hosts at a time
        self._news = threading.Condition()
        self._numbers = count(1)
        self._number = 0
        self._heard: list[Message] = []
        self._owing: set[int] = set()  # hosts that have not answered an earlier question
        self._visitors = threading.Semaphore(VISITORS)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        for place, host in enumerate(hosts):
            host.on_tail = partial(self._hear, place)
        try:
            self._socket.bind(_address(run))
            self._socket.listen(VISITORS)
        except OSError:  # the job runs all the same
            self._socket.close()
            return
        threading.Thread(target=self._accept, daemon=True).start()

    def replace(self, place: int, host: Host) -> None:
        """Another agent is on this host from now on."""
        host.on_tail = partial(self._hear, place)
        with self._news:
            self._hosts[place] = host
            self._owing.discard(place)

    def close(self) -> None:
        """Nobody is answered any more; who looks sees the job's end."""
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
                time.sleep(NO_ROOM_S)  # the process has no descriptor left for now
                continue
            if not _own(visitor) or not self._visitors.acquire(blocking=False):
                visitor.close()
                continue
            threading.Thread(target=self._welcome, args=(visitor,), daemon=True).start()

    def _welcome(self, visitor: socket.socket) -> None:
        patience = struct.pack("ll", int(VISITOR_SECONDS), 0)
        try:
            for which in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                visitor.setsockopt(socket.SOL_SOCKET, which, patience)
            channel = Channel(visitor.fileno(), visitor.fileno())
            for message, _ in channel.take() or []:
                most = min(max(int(message["tails"]), 0), MOST_EVENTS)
                for answer, raw in self._collect(most, False):
                    channel.send(answer, raw)
        except (OSError, BrokenError, KeyError, TypeError, ValueError):
            pass  # it has gone, or is none of ours
        finally:
            visitor.close()
            self._visitors.release()

    def look(self, most: int) -> "Seen":
        """For the launcher itself, with the ranks' stacks."""
        return seen(self._collect(most, True))

    def _collect(self, most: int, stacks: bool) -> list[Message]:
        """What all hosts answer, and at the end who did not."""
        if self.ending or most == 0:
            return [({"end": True, "silent": [], "ending": self.ending, **self._about}, b"")]
        with self._turn:
            with self._news:
                self._number, self._heard = next(self._numbers), []
                free = [place for place in range(len(self._hosts)) if place not in self._owing]
                self._owing.update(free)
            for place in free:
                if not self._hosts[place].offer(tails=self._number, most=most, stacks=stacks):
                    with self._news:
                        self._owing.discard(place)
                        free = [other for other in free if other != place]
            with self._news:
                wait = ANSWER_SECONDS + (STACK_SECONDS if stacks else 0.0)
                # A launcher that was stopped has heard of nobody until it reads what has come.
                if not self._news.wait_for(partial(self._all_answered, free, False), SOON_SECONDS):
                    rest = wait - SOON_SECONDS
                    self._news.wait_for(partial(self._all_answered, free, True), rest)
                silent = [
                    host.name
                    for place, host in enumerate(self._hosts)
                    if place not in free or place in self._owing
                ]
                heard, self._heard = self._heard, []
        return [*heard, ({"end": True, "silent": silent, "ending": False, **self._about}, b"")]

    def _all_answered(self, asked: list[int], but_silent: bool) -> bool:
        """but_silent: nobody is waited for who has been silent for long already."""
        awaited = [self._hosts[place] for place in asked if place in self._owing]
        return self.ending or all(host.trouble or (but_silent and host.silent) for host in awaited)

    def _hear(self, place: int, message: dict[str, Any], raw: bytes) -> None:
        """Called by the thread that reads the host's channel: takes no time."""
        with self._news:
            if "done" in message:
                self._owing.discard(place)
                self._news.notify_all()
            elif message.get("tails") == self._number:
                self._heard.append((message, raw))


@dataclass(frozen=True)
class Seen:
    """What is seen of a job at one time. silent: names of hosts that have not answered. about:
    what the launcher says of the job."""

    tails: list[Tail]
    silent: list[str]
    ending: bool
    about: dict[str, Any]


def ask(run: str, most: int) -> Seen | None:
    """Ask the launcher of a job on several hosts; None where it is not there (any more).

    Raises ValueError where it is there and does not answer.
    """
    for _ in range(TRIES):
        try:
            return _ask(run, most)
        except BusyError:
            time.sleep(BUSY_SECONDS)
        except ConnectionRefusedError:
            return None
    raise ValueError(_SILENT)


class UnreachableError(ValueError):
    """A launcher's socket takes no connection; it may be another user's under that name."""


class BusyError(Exception):
    """The launcher has broken the conversation off: others are there, or it ends."""


def _ask(run: str, most: int) -> Seen | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE_SECONDS)
        try:
            connection.connect(_address(run))
        except ConnectionRefusedError:
            raise
        except OSError:  # its queue is full: whose it is can't be seen
            raise UnreachableError(_SILENT) from None
        if not _own(connection):
            return None
        patience = struct.pack("ll", int(PATIENCE_SECONDS), 0)
        connection.settimeout(None)
        for which in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, which, patience)
        return _conversation(Channel(connection.fileno(), connection.fileno()), most)


_SILENT = (
    "the launcher of the job does not answer. HINT: is it stopped (Ctrl-Z), or do "
    "many look at once?"
)


def seen(messages: list[Message]) -> Seen:
    """What a whole answer says; its last message is the end."""
    *told, (end, _) = messages
    found = [
        Tail(about["ring"], about["now"], about["process"], _unpacked(raw), about["stack"])
        for about, raw in printable_tree(told)
    ]
    end = printable_tree(end)
    return Seen(found, end["silent"], end["ending"], end)


def _unpacked(raw: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    data = unpacking.decompress(raw, MAX_TAIL_BYTES)
    if unpacking.unconsumed_tail:
        raise ValueError(f"a tail of more than {MAX_TAIL_BYTES:,} bytes")
    return data


def _conversation(channel: Channel, most: int) -> Seen:
    found: list[Message] = []
    started = time.monotonic()
    try:
        channel.send({"tails": most})
        while (messages := channel.take()) is not None:
            found += messages
            if found and "end" in found[-1][0]:
                return seen(found)
    except (OSError, BrokenError, zlib.error):
        pass
    if time.monotonic() - started > PATIENCE_SECONDS - 1.0:
        raise ValueError(_SILENT)
    raise BusyError


def listening() -> list[str]:
    """Names of this user's jobs on several hosts whose launchers are on this one."""
    name = re.compile(rb" @%s([0-9a-zA-Z_-]+)\n" % _prefix().encode())
    try:
        with SOCKETS.open("rb") as lines:  # any user can give a socket a name that is no text
            found = {match[1].decode() for line in lines if (match := name.search(line))}
    except OSError:
        return []
    return sorted(found)


def _prefix() -> str:
    return f"paceline-live-{os.getuid()}-"


def _address(run: str) -> str:
    return "\0" + _prefix() + run


def _own(connection: socket.socket) -> bool:
    """Whether the other side is the same user."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(peer)[1] == os.geteuid())
