"""Sends and receives between the ranks of one node, through memory.

A send copies its tensor into a file without a name that the receiver has a descriptor of, and
announces it over a socket: it never waits. A receive copies it out, in the thread that waits for
it. So a message costs two copies, and needs no thread that competes with those that compute.

Each pair of ranks has a connection and a file for each direction in which messages go.
"""

import contextlib
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...record.hooks.error_messages import NAMED_PEER_GONE
from . import memory
from .collective_calls import ExchangeError

HELLO_TIMEOUT_S = 5.0
SLICE_S = 0.2  # of a wait, after which is seen whether the sender lives
KEPT_BYTES = 64 << 20  # of a file without messages
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


class Outbox:
    """The messages of this rank to another one.

    Args:
        address: Where the other rank listens.
    """

    def __init__(self, address: str, rank: int) -> None:
        with contextlib.ExitStack() as cleanup:
            self._connection = memory.connect_to(address, kind=socket.SOCK_SEQPACKET)
            cleanup.callback(self._connection.close)
            self._file = os.memfd_create("paceline-messages", os.MFD_CLOEXEC)
            cleanup.callback(os.close, self._file)
            socket.send_fds(self._connection, [_HELLO.pack(rank)], [self._file])
            self._connection.setblocking(False)
            cleanup.pop_all()
        self._capacities: dict[int, int] = {}  # by offset
        self._free: list[int] = []  # offsets
        self._end = 0
        self._order = threading.Lock()
        self._late: deque[bytes] = deque()  # announced by a thread, where the socket is full
        self._thread: threading.Thread | None = None

    def send(self, content: memoryview, tag: int) -> None:
        """Send bytes; raises OSError where the receiver has ended."""
        self._take_freed()
        offset, done = self._allocate(content.nbytes), 0
        while done < content.nbytes:
            part = content[done : done + MAX_COPY_BYTES]
            done += os.pwrite(self._file, part, offset + done)
        note = _NOTE.pack(offset, content.nbytes, tag)
        with self._order:
            if self._late or not _try_send(self._connection, note):
                self._late.append(note)
                self._start_thread()

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._announce_late, name="paceline-messages", daemon=True
            )
            self._thread.start()

    def _announce_late(self) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        while True:
            with self._order:
                try:
                    while self._late and _try_send(self._connection, self._late[0]):
                        self._late.popleft()
                except OSError:  # the receiver has ended, which the next call sees as well
                    self._late.clear()
                if not self._late:
                    self._thread = None
                    return
            poll.poll(SLICE_S * 1000)

    def _take_freed(self) -> None:
        while freed := _try_receive(self._connection, _FREED.size):
            self._free.append(_FREED.unpack(freed)[0])
        if self._end > KEPT_BYTES and len(self._free) == len(self._capacities):
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
        self._connection.close()
        os.close(self._file)


class Inbox:
    """The messages of another rank to this one, in the order of sending."""

    def __init__(self, connection: socket.socket, source: int, file: int) -> None:
        self.connection, self.source, self._file = connection, source, file
        self.is_closed = False
        self._freed: deque[bytes] = deque()  # the sender does not know them yet

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
        self._freed.append(_FREED.pack(note.offset))
        try:
            while self._freed and _try_send(self.connection, self._freed[0]):
                self._freed.popleft()
        except OSError:  # the sender has ended, and needs no place
            self._freed.clear()

    def close(self) -> None:
        self.connection.close()
        os.close(self._file)


class MessageWork(dist.Work):
    """A receive.

    Attributes:
        source: Rank of the sender; None: any, until it is known.
    """

    def __init__(
        self, messages: "Messages", tensor: torch.Tensor, source: int | None, tag: int
    ) -> None:
        super().__init__()
        self.source, self.tag = source, tag
        self.is_done = False
        self._messages, self._tensor = messages, tensor
        self._flat = tensor.detach().contiguous()
        self._error: BaseException | None = None

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

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return [self._tensor]

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
        self._listener = memory.listen_at(address, kind=socket.SOCK_SEQPACKET)
        store.set(str(rank), address)
        self._lock = threading.Lock()
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._posted: list[MessageWork] = []
        self._unmatched: list[Note] = []

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Send a tensor; it may be changed afterwards."""
        flat = tensor.detach().contiguous()
        try:
            with self._lock:
                if peer not in self._outboxes:
                    address = self._store.get(str(peer)).decode()
                    self._outboxes[peer] = Outbox(address, self.rank)
                self._outboxes[peer].send(bytes_of(flat), tag)
        except OSError as error:
            if self._is_alive(peer):
                raise self._error(f"a send to rank {self._names[peer]}: {error}") from error
            raise self._gone("send of", flat.nbytes, peer) from error

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
                    work = next((one for one in self._posted if _fits(one, note)), None)
                    if work is None:
                        self._unmatched.append(note)
                    else:
                        self._deliver(note, work)

    def await_message(self, work: MessageWork, timeout: float) -> None:
        """Wait until a receive has its message.

        Raises:
            ExchangeError: The sender has ended, or sends nothing within the timeout.
        """
        limit = timeout or self._timeout
        deadline = time.monotonic() + limit
        is_gone = False
        while True:
            self.take_arrived()
            if work.is_done:
                return
            if is_gone:
                assert work.source is not None
                raise self._gone("receive of", work.nbytes, work.source)
            if time.monotonic() > deadline:
                sender = "any rank" if work.source is None else f"rank {self._names[work.source]}"
                raise self._error(
                    f"receive of {work.nbytes:,} bytes: {sender} did not send them within "
                    f"{limit:g} s. HINT: check whether the rank is stopped; for longer "
                    "computations, set a larger timeout= in paceline.init or init_process_group"
                )
            if not self._poll(min(SLICE_S, max(deadline - time.monotonic(), 0.0))):
                # what it has sent before its end is taken first
                is_gone = work.source is not None and not self._is_alive(work.source)

    def _poll(self, seconds: float) -> bool:
        """Wait until something may have come; return whether it has."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        for inbox in list(self._inboxes.values()):  # another thread may add one
            if not inbox.is_closed:
                poll.register(inbox.connection, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def _accept(self) -> None:
        while (accepted := memory.accept_own_user(self._listener)) is not None:
            accepted.settimeout(HELLO_TIMEOUT_S)  # it follows at once
            try:
                content, files, _, _ = socket.recv_fds(accepted, _HELLO.size, 1)
                (source,) = _HELLO.unpack(content)
                (file,) = files
            except (OSError, struct.error, ValueError):  # the sender has ended, or is no rank
                accepted.close()
                continue
            accepted.setblocking(False)
            self._inboxes[source] = Inbox(accepted, source, file)

    def _deliver(self, note: Note, work: MessageWork) -> None:
        self._posted.remove(work)
        work.take(self._inboxes[note.source], note, f"rank {self._names[note.source]}")

    def _gone(self, what: str, nbytes: int, peer: int) -> ExchangeError:
        name = self._names[peer]
        return self._error(f"{what} {nbytes:,} bytes {NAMED_PEER_GONE} {name} has died")

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
