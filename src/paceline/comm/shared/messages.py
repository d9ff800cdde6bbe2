"""Sends and receives between the ranks of one node, through memory.

A send copies its tensor into a file without a name that the receiver has a descriptor of, and
announces it over a socket: it never waits. A receive copies it out, in the thread that waits for
it. So a message costs two copies, and needs no thread that competes with those that compute. Only
the wait for a send waits for the receiver, once a lot of memory is taken by messages to it.

Each pair of ranks has a connection and a file for each direction in which messages go.
"""

import atexit
import contextlib
import errno
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from ...record.hooks.error_messages import NAMED_PEER_GONE
from . import memory
from .async_collectives import ExchangeWork
from .collective_calls import ExchangeError

HELLO_TIMEOUT_S = 5.0
SLICE_S = 0.2  # of a wait, after which is seen whether the sender lives
KEPT_BYTES = 64 << 20  # of a file without messages
MAX_UNRECEIVED_BYTES = 1 << 30  # to one rank, above which a wait for a send waits for it
MIN_SLOT_BYTES = 4096
MAX_COPY_BYTES = 1 << 30  # of one call: Linux copies less than 2 GiB
_HELLO, _NOTE, _FREED = struct.Struct("<Q"), struct.Struct("<QQq"), struct.Struct("<Q")


class Note(NamedTuple):
    """A message that has been sent.

    Attributes:
        source: Rank of the sender.
        offset, nbytes: Its place in the sender's file.
    """

    source: int
    offset: int
    nbytes: int
    tag: int


class Announcements:
    """Datagrams to the other side of a connection, which never wait for it.

    Where the socket is full, a thread sends the rest.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._order = threading.Lock()
        self._late: deque[bytes] = deque()
        self.thread: threading.Thread | None = None

    def send(self, content: bytes) -> None:
        """Send a datagram; raises OSError where the other side has ended."""
        with self._order:
            if self._late or not _try_send(self._connection, content):
                self._late.append(content)
                if self.thread is None:
                    self.thread = threading.Thread(
                        target=self._send_late, name="paceline-messages", daemon=True
                    )
                    self.thread.start()

    def _send_late(self) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        while True:
            with self._order:
                try:
                    while self._late and _try_send(self._connection, self._late[0]):
                        self._late.popleft()
                except OSError:  # the other side has ended, which the next call sees as well
                    self._late.clear()
                if not self._late:
                    self.thread = None
                    return
            poll.poll(SLICE_S * 1000)


class Outbox:
    """The messages of this rank to another one.

    Args:
        address: Where the other rank listens.
    """

    def __init__(self, address: str, rank: int) -> None:
        with contextlib.ExitStack() as cleanup:
            self.connection = memory.connect_to(address)
            cleanup.callback(self.connection.close)
            self._file = os.memfd_create("paceline-messages", os.MFD_CLOEXEC)
            cleanup.callback(os.close, self._file)
            socket.send_fds(self.connection, [_HELLO.pack(rank)], [self._file])
            self.connection.setblocking(False)
            cleanup.pop_all()
        self.notes = Announcements(self.connection)
        self._capacities: dict[int, int] = {}  # by offset
        self._free: list[int] = []  # offsets
        self._end = 0
        self._sent = 0  # messages
        self._unreceived: dict[int, int] = {}  # number of the message by offset
        self._unreceived_bytes = 0
        self.is_closed = False

    def send(self, content: memoryview, tag: int) -> int:
        """Send bytes; return the number of the message.

        Raises OSError where the receiver has ended.
        """
        self.take_freed()
        offset, done = self._allocate(content.nbytes), 0
        while done < content.nbytes:
            part = content[done : done + MAX_COPY_BYTES]
            done += os.pwrite(self._file, part, offset + done)
        self._sent += 1
        self._unreceived[offset] = self._sent
        self._unreceived_bytes += self._capacities[offset]
        self.notes.send(_NOTE.pack(offset, content.nbytes, tag))
        return self._sent

    def may_continue(self, number: int) -> bool:
        """Return whether a sender need not wait for the receiver of a message."""
        self.take_freed()
        is_full = self._unreceived_bytes > MAX_UNRECEIVED_BYTES
        return not is_full or number not in self._unreceived.values()

    def take_freed(self) -> None:
        """Note which messages have been received."""
        while freed := _try_receive(self.connection, _FREED.size):
            offset = _FREED.unpack(freed)[0]
            self._free.append(offset)
            del self._unreceived[offset]
            self._unreceived_bytes -= self._capacities[offset]
        self.is_closed = self.is_closed or freed is not None
        if self._end > KEPT_BYTES and not self._unreceived:
            os.ftruncate(self._file, 0)
            self._capacities, self._free, self._end = {}, [], 0

    def _allocate(self, nbytes: int) -> int:
        """Return the offset of a free place: the smallest one that is not much too large."""
        most = max(2 * nbytes, MIN_SLOT_BYTES)
        fitting = [o for o in self._free if nbytes <= self._capacities[o] <= most]
        if fitting:
            offset = min(fitting, key=self._capacities.__getitem__)
            self._free.remove(offset)
            return offset
        offset, capacity = self._end, -(-max(nbytes, 1) // MIN_SLOT_BYTES) * MIN_SLOT_BYTES
        self._capacities[offset] = capacity
        self._end += capacity
        return offset

    def close(self) -> None:
        self.is_closed = True
        self.connection.close()
        os.close(self._file)


class Inbox:
    """The messages of another rank to this one, in the order of sending."""

    def __init__(self, connection: socket.socket, source: int, file: int) -> None:
        self.connection, self.source, self._file = connection, source, file
        self.is_closed = False
        self._freed = Announcements(connection)

    def arrived(self) -> Note | None:
        """Return the next message that has come."""
        content = _try_receive(self.connection, _NOTE.size)
        if not content:
            self.is_closed = self.is_closed or content is not None
            return None
        return Note(self.source, *_NOTE.unpack(content))

    def copy(self, note: Note, to: memoryview) -> None:
        """Copy a message, and free its place."""
        done = 0
        while done < to.nbytes:
            part = to[done : done + MAX_COPY_BYTES]
            count = os.preadv(self._file, [part], note.offset + done)
            if not count:
                raise ExchangeError(f"a message of rank {self.source} is shorter than announced")
            done += count
        self.free(note)

    def free(self, note: Note) -> None:
        with contextlib.suppress(OSError):  # the sender has ended, and needs no place
            self._freed.send(_FREED.pack(note.offset))

    def close(self) -> None:
        self.connection.close()
        os.close(self._file)


class SendWork(ExchangeWork):
    """A send. Its tensor may be changed at once."""

    def __init__(
        self, messages: "Messages", tensor: torch.Tensor, outbox: Outbox, peer: int, number: int
    ) -> None:
        super().__init__([tensor])
        self._messages, self._nbytes = messages, tensor.nbytes
        self._outbox, self._peer, self._number = outbox, peer, number

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.is_completed():
            self._messages.await_room(
                *(self._outbox, self._peer, self._number, self._nbytes),
                timeout.total_seconds() if timeout else 0.0,
            )
        return True

    def is_completed(self) -> bool:
        return self._messages.may_continue(self._outbox, self._number)


class MessageWork(ExchangeWork):
    """A receive.

    Attributes:
        source: Rank of the sender; None: any, until it is known.
    """

    def __init__(
        self, messages: "Messages", tensor: torch.Tensor, source: int | None, tag: int
    ) -> None:
        super().__init__([tensor])
        self.source, self.tag = source, tag
        self.is_done = False
        self._messages, self._tensor = messages, tensor
        self._flat = tensor.detach().contiguous()

    @property
    def nbytes(self) -> int:
        return int(self._flat.nbytes)

    def take(self, inbox: Inbox, note: Note, name: str) -> None:
        """Copy a message into the tensor."""
        self.source, self.is_done = note.source, True
        if note.nbytes != self.nbytes:
            inbox.free(note)
            self._error = ExchangeError(
                f"{name} has sent {note.nbytes:,} bytes, and this rank receives {self.nbytes:,}. "
                "HINT: receive into a tensor of the same size and dtype"
            )
            return
        if note.nbytes:
            inbox.copy(note, bytes_of(self._flat))
        else:
            inbox.free(note)
        if self._flat.data_ptr() != self._tensor.data_ptr():
            self._tensor.detach().copy_(self._flat)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.is_done:
            self._messages.await_message(self, timeout.total_seconds() if timeout else 0.0)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        if not self.is_done:
            self._messages.take_arrived()
        return self.is_done

    def source_rank(self) -> int:
        return -1 if self.source is None else self.source

    _source_rank = source_rank


class Messages:
    """The messages of the ranks of a group, which are on one node.

    Args:
        store: Where the ranks meet.
        is_alive: Returns whether a rank's process lives.
        names: Numbers of the group's ranks in the job.
        timeout: Seconds that a receive waits.
        where: Returns the prefix of error messages.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        names: Sequence[int],
        is_alive: Callable[[int], bool],
        timeout: float,
        where: Callable[[], str] = str,
    ) -> None:
        self.rank, self._names, self._timeout, self._where = rank, names, timeout, where
        self._store, self._is_alive = store, is_alive
        address = f"paceline-{secrets.token_hex(16)}"
        self._listener = memory.listen_at(address)
        store.set(str(rank), address)
        self._lock = threading.Lock()
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._posted: list[MessageWork] = []
        self._unmatched: list[Note] = []
        self._pid = os.getpid()
        _open.add(self)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> SendWork:
        """Send a tensor; it may be changed afterwards."""
        flat = tensor.detach().contiguous()
        try:
            with self._lock:
                if peer not in self._outboxes:
                    address = self._store.get(str(peer)).decode()
                    self._outboxes[peer] = Outbox(address, self.rank)
                outbox = self._outboxes[peer]
                number = outbox.send(bytes_of(flat), tag)
        except OSError as error:
            if self._is_alive(peer):
                raise self._error(f"a send to rank {self._names[peer]}: {error}") from error
            raise self._gone(f"send of {flat.nbytes:,} bytes", peer) from error
        return SendWork(self, tensor, outbox, peer, number)

    def may_continue(self, outbox: Outbox, number: int) -> bool:
        """As the outbox says; a receiver that has ended is an error of the next send."""
        with self._lock:
            return outbox.is_closed or outbox.may_continue(number)

    def receive(self, tensor: torch.Tensor, peer: int | None, tag: int) -> MessageWork:
        """Begin to receive a tensor.

        Args:
            peer: Rank of the sender; None: any.
        """
        work = MessageWork(self, tensor, peer, tag)
        with self._lock:
            self._posted.append(work)
            for note in self._unmatched:
                if _fits(work, note):
                    self._unmatched.remove(note)
                    self._deliver(note, work)
                    break
        return work

    def take_arrived(self) -> None:
        """Deliver the messages that have come, and do not wait for others."""
        with self._lock:
            self._accept()
            for inbox in self._inboxes.values():
                while note := inbox.arrived():
                    work = next((posted for posted in self._posted if _fits(posted, note)), None)
                    if work is None:
                        self._unmatched.append(note)
                    else:
                        self._deliver(note, work)

    def await_message(self, work: MessageWork, timeout: float) -> None:
        """Wait until a receive has its message.

        Raises:
            ExchangeError: The sender has ended, or sends nothing within the timeout.
        """
        what = f"receive of {work.nbytes:,} bytes"
        try:
            self._await(lambda: work.is_done, work.source, what, "send", timeout)
        except ExchangeError:
            with self._lock:  # a later message is for another receive
                if work in self._posted:
                    self._posted.remove(work)
            raise

    def await_room(
        self, outbox: Outbox, peer: int, number: int, nbytes: int, timeout: float
    ) -> None:
        """Wait until a message has been received, or the ones to its receiver take less memory.

        Raises:
            ExchangeError: The receiver has ended, or receives nothing within the timeout.
        """
        self._await(
            lambda: self.may_continue(outbox, number),
            *(peer, f"send of {nbytes:,} bytes", "receive", timeout, outbox),
        )

    def _await(
        self,
        is_done: Callable[[], bool],
        peer: int | None,
        what: str,
        missing: str,
        timeout: float,
        outbox: Outbox | None = None,
    ) -> None:
        """Deliver the messages that come, until a call is done.

        Args:
            peer: The other rank; None: any.
            missing: What the other rank has to do.
        """
        limit = timeout or self._timeout
        start = time.monotonic()
        next_look, is_gone = start + SLICE_S, False
        while True:
            self.take_arrived()
            if is_done():
                return
            if is_gone:  # what it has sent before its end has been taken
                raise self._gone(what, peer)
            now = time.monotonic()
            if now > start + limit:
                other = "any rank" if peer is None else f"rank {self._names[peer]}"
                raise self._error(
                    f"{what}: {other} did not {missing} them within {limit:g} s. HINT: check "
                    "whether the rank is stopped; for longer computations, set a larger timeout= "
                    "in paceline.init or init_process_group"
                )
            if now > next_look:
                next_look, is_gone = now + SLICE_S, self._has_died(peer)
            self._poll(min(SLICE_S, start + limit - now), outbox)

    def _has_died(self, peer: int | None) -> bool:
        """Return whether a rank has ended; None: whether all others have."""
        if peer is not None:
            return not self._is_alive(peer)
        others = [rank for rank in range(len(self._names)) if rank != self.rank]
        return not any(map(self._is_alive, others))

    def flush(self) -> None:
        """Wait until all messages are on the way, also those that a socket has no room for yet."""
        if self._pid != os.getpid():
            return
        deadline = time.monotonic() + self._timeout
        for peer, outbox in list(self._outboxes.items()):
            while (thread := outbox.notes.thread) is not None and time.monotonic() < deadline:
                self.take_arrived()  # the other rank may wait for the same
                thread.join(SLICE_S)
                if not self._is_alive(peer):
                    break

    def _poll(self, seconds: float, outbox: Outbox | None) -> None:
        """Wait until a message may have come, or one of an outbox has been received."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        boxes: list[Inbox | Outbox] = [*self._inboxes.values()]  # another thread may add one
        boxes += [outbox] if outbox is not None else []
        for box in boxes:
            if not box.is_closed:
                poll.register(box.connection, select.POLLIN)
        poll.poll(max(seconds, 0.0) * 1000)

    def _accept(self) -> None:
        try:
            while (accepted := memory.accept_own_user(self._listener)) is not None:
                self._open_inbox(accepted)
        except OSError as error:
            files = error.errno in (errno.EMFILE, errno.ENFILE)
            hint = ". HINT: ulimit -n 65536, before the job starts" if files else ""
            text = f"messages of another rank can't be received: {error.strerror}{hint}"
            raise self._error(text) from error

    def _open_inbox(self, accepted: socket.socket) -> None:
        accepted.settimeout(HELLO_TIMEOUT_S)  # it follows at once
        try:
            content, files, flags, _ = socket.recv_fds(accepted, _HELLO.size, 1)
            is_cut = bool(flags & socket.MSG_CTRUNC) and not files
            (source,), (file,) = _HELLO.unpack(content), files or (-1,)
        except (OSError, struct.error, ValueError):  # the sender has ended, or is no rank
            accepted.close()
            return
        if file < 0:
            accepted.close()
            if is_cut:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return
        accepted.setblocking(False)
        self._inboxes[source] = Inbox(accepted, source, file)

    def _deliver(self, note: Note, work: MessageWork) -> None:
        self._posted.remove(work)
        work.take(self._inboxes[note.source], note, f"rank {self._names[note.source]}")

    def _gone(self, what: str, peer: int | None) -> ExchangeError:
        if peer is None:
            first = next(name for at, name in enumerate(self._names) if at != self.rank)
            return self._error(f"{what} {NAMED_PEER_GONE} {first} and all others have died")
        return self._error(f"{what} {NAMED_PEER_GONE} {self._names[peer]} has died")

    def _error(self, text: str) -> ExchangeError:
        return ExchangeError(f"{self._where()}{text}")

    def close(self) -> None:
        """Close all connections: later sends of others to this rank fail."""
        self._listener.close()
        boxes: list[Outbox | Inbox] = [*self._outboxes.values(), *self._inboxes.values()]
        for box in boxes:
            box.close()
        self._outboxes, self._inboxes = {}, {}

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending() and hasattr(self, "_listener"):
            self.close()


_open: weakref.WeakSet[Messages] = weakref.WeakSet()


@atexit.register
def _flush_at_exit() -> None:
    """Let messages that have been sent arrive, unless this rank has failed."""
    if not hasattr(sys, "last_value"):
        for messages in list(_open):
            messages.flush()


def _fits(work: MessageWork, note: Note) -> bool:
    return work.tag == note.tag and work.source in (None, note.source)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    flat = tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0).byte()
    array: Any = flat.numpy()
    return memoryview(array)


def _try_send(connection: socket.socket, content: bytes) -> bool:
    """Send a datagram, and return True; False where the socket is full."""
    try:
        connection.send(content, socket.MSG_NOSIGNAL)
    except BlockingIOError:
        return False
    return True


def _try_receive(connection: socket.socket, nbytes: int) -> bytes | None:
    """Return the next datagram; None where there is none yet, b"" after the other side's end."""
    try:
        return connection.recv(nbytes)
    except BlockingIOError:
        return None
    except ConnectionError:
        return b""
