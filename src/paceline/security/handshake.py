"""Authenticate incoming connections before their data is trusted.

Anyone on a network can connect to a listening socket, send nothing, and wait. All servers of
Paceline therefore accept connections through ``Acceptor``: one thread, non-blocking sockets, a
deadline, and limits on the number of connections that are not authenticated yet.

A handshake is a generator. It yields a ``HandshakeStep``, which holds bytes to send and a number of
bytes to read, and receives the bytes that were read; its return value is the result. It raises
OSError or ValueError to refuse the connection::

    def handshake(address: str) -> Handshake[int]:
        token, number = REQUEST.unpack((yield HandshakeStep(read=REQUEST.size)))
        if not hmac.compare_digest(token, expected):
            raise HandshakeError("a wrong token")
        return number
"""

import contextlib
import errno
import resource
import select
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

HANDSHAKE_TIMEOUT_S = 1.0  # from accept until the handshake must be complete
MAX_PENDING = 1024  # maximum number of connections with an incomplete handshake
MAX_PENDING_PER_ADDRESS = 256
MAX_ACCEPTED_PER_POLL = 64  # then pending connections are served again
MAX_COUNTED_ADDRESSES = 1024  # addresses that are counted separately
MAX_SHOWN_ADDRESSES = 4
ACCEPT_PAUSE_S = 0.1  # pause of accepting when the process has no descriptors left
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class HandshakeError(OSError):
    """The other side fails the handshake."""


# Errors on the connecting side if its connection was accepted and then closed.
DROPPED_CONNECTION_ERRORS = (HandshakeError, ConnectionResetError, BrokenPipeError)


class HandshakeTimeoutError(HandshakeError, TimeoutError):
    """The other side did not complete the handshake in time."""


class HandshakeStep(NamedTuple):
    """Next step of a handshake.

    Attributes:
        send: Bytes to send first; few enough to fit into an empty socket buffer.
        read: Number of bytes to read then; maximum length if ``line`` is True.
        line: Whether to read only up to a line end. A line that is too long is refused.
    """

    send: bytes = b""
    read: int = 0
    line: bool = False


Handshake = Generator[HandshakeStep, bytes, T]


class HandshakeRun(Generic[T]):
    """One handshake on one non-blocking socket.

    Attributes:
        result: Return value of the handshake, available after ``proceed`` has returned True.
    """

    def __init__(self, connection: socket.socket, handshake: Handshake[T]) -> None:
        self.connection, self._handshake = connection, handshake
        self._step: HandshakeStep | None = None
        self._data = bytearray()
        self.result: T

    def proceed(self) -> bool:
        """Send and read as far as possible without waiting.

        Returns:
            Whether the handshake is complete. No bytes after the handshake have been read.

        Raises:
            OSError, ValueError: The other side is refused, has disconnected, or does not read.
        """
        try:
            if self._step is None:
                self._begin(next(self._handshake))
            while self._step is not None and self._receive(self._step):
                data = bytes(self._data)
                self._data.clear()
                self._begin(self._handshake.send(data))
        except StopIteration as end:
            self.result = end.value
            return True
        return False

    def _begin(self, step: HandshakeStep) -> None:
        self._step = step
        if step.send and self.connection.send(step.send) < len(step.send):
            raise HandshakeError("the other side does not read the greeting")

    def _receive(self, step: HandshakeStep) -> bool:
        """Read the available bytes, and return whether the step is complete."""
        while (left := step.read - len(self._data)) > 0:
            try:
                data = self._recv_line(left) if step.line else self.connection.recv(left)
            except (BlockingIOError, InterruptedError):
                return False
            if not data:
                raise HandshakeError("the connection was closed during the greeting")
            self._data += data
            if step.line and data.endswith(b"\n"):
                return True
        if step.line:
            raise HandshakeError(f"a line of more than {step.read} bytes")
        return True

    def _recv_line(self, max_bytes: int) -> bytes:
        available = self.connection.recv(max_bytes, socket.MSG_PEEK)
        return self.connection.recv(available.find(b"\n") + 1 or len(available) or 1)


def run_handshake(connection: socket.socket, handshake: Handshake[T], seconds: float) -> T:
    """Run a handshake on a connected socket until it is complete; makes the socket non-blocking.

    Raises:
        HandshakeTimeoutError: The handshake was not complete within ``seconds``.
        OSError, ValueError: Same as for ``HandshakeRun.proceed``.
    """
    deadline = time.monotonic() + seconds
    connection.setblocking(False)
    run = HandshakeRun(connection, handshake)
    poll = select.poll()  # select does not support descriptors above 1023
    poll.register(connection, select.POLLIN)
    while not run.proceed():
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise HandshakeTimeoutError(
                errno.ETIMEDOUT, f"no answer to the greeting in {seconds:.0f} s"
            )
    return run.result


class RejectedConnections:
    """Number of rejected connections by address: failed, timed out, or closed to make room."""

    def __init__(self) -> None:
        self.by_address: Counter[str] = Counter()
        self.elsewhere = 0  # connections from addresses beyond MAX_COUNTED_ADDRESSES

    def add(self, address: str) -> None:
        """Count one connection."""
        if address in self.by_address or len(self.by_address) < MAX_COUNTED_ADDRESSES:
            self.by_address[address] += 1
        else:
            self.elsewhere += 1

    @property
    def total(self) -> int:
        """Return the number of connections from all addresses."""
        return self.by_address.total() + self.elsewhere

    def __str__(self) -> str:
        """Return the addresses with the most connections: ``10.0.0.5 (200), 10.0.0.6 (12)``."""
        shown = self.by_address.most_common(MAX_SHOWN_ADDRESSES)
        words = [f"{address} ({count})" for address, count in shown]
        rest = self.total - sum(count for _, count in shown)
        return ", ".join([*words, f"other addresses ({rest})"] if rest else words)


def _max_pending_descriptors() -> int:
    """Return the maximum number of this process's descriptors for pending connections."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_PENDING if limit == resource.RLIM_INFINITY else max(1, limit // 4)


@dataclass
class _PendingConnection(Generic[T]):
    run: HandshakeRun[T]
    address: str
    deadline: float


class Acceptor(Generic[T]):
    """Accept connections on listening sockets and return those that complete a handshake.

    Connections that do not complete a correct handshake within ``seconds`` are closed and counted
    as rejected. If too many connections are pending, in total or from one address, the oldest of
    them is closed. Not thread-safe; ``fileno`` is readable when ``wait(0)`` has work to do.

    Args:
        listening: Listening sockets; ``close`` closes them.
        handshake: Called with the peer's address for each connection; returns the generator.
        seconds: Time from accept until the handshake must be complete.
        max_pending: Maximum number of connections with an incomplete handshake; at most a quarter
            of the descriptors that the process may have.
        max_per_address: Maximum number of such connections from one address.

    Attributes:
        strangers: Connections that the acceptor closed, by address.
        pending: Number of connections with an incomplete handshake.
    """

    def __init__(
        self,
        listening: Sequence[socket.socket],
        handshake: Callable[[str], Handshake[T]],
        *,
        seconds: float = HANDSHAKE_TIMEOUT_S,
        max_pending: int = MAX_PENDING,
        max_per_address: int = MAX_PENDING_PER_ADDRESS,
    ) -> None:
        self._handshake, self._seconds = handshake, seconds
        room = _max_pending_descriptors()
        self._max_pending = min(max_pending, room)
        self._max_per_address = min(max_per_address, max(1, room // 2))
        self.strangers = RejectedConnections()
        self._visitors: OrderedDict[int, _PendingConnection[T]] = (
            OrderedDict()
        )  # in the order of accept
        self._of_address: dict[str, OrderedDict[int, None]] = {}
        self._admitted: list[tuple[socket.socket, T]] = []
        self._resume_at: float | None = None
        self._epoll = select.epoll()
        self._listening = {server.fileno(): server for server in listening}
        for fd, server in self._listening.items():
            server.setblocking(False)
            self._epoll.register(fd, select.EPOLLIN)

    def __enter__(self) -> "Acceptor[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the descriptor to poll; for the deadlines, also call ``wait`` periodically."""
        return self._epoll.fileno()

    @property
    def pending(self) -> int:
        return len(self._visitors)

    def wait(self, seconds: float) -> list[tuple[socket.socket, T]]:
        """Serve connections until one has completed its handshake, or ``seconds`` have passed.

        Returns:
            Connections (non-blocking) with the results of their handshakes.

        Raises:
            OSError: No listening socket is open any more.
        """
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - (now := time.monotonic())
            first = next(iter(self._visitors.values()), None)
            until = [left, *([first.deadline - now] if first else [])]
            if self._resume_at is not None:
                until.append(self._resume_at - now)
            self._serve(self._epoll.poll(max(0.0, min(until)), 256))
            if self._admitted or time.monotonic() >= deadline:
                admitted, self._admitted = self._admitted, []
                return admitted
            if not self._listening:
                raise OSError(errno.EBADF, "the listening socket was closed")

    def close(self) -> None:
        """Close the listening sockets, and all connections that were not returned."""
        for listening in self._listening.values():
            listening.close()
        for visitor in self._visitors.values():
            visitor.run.connection.close()
        for connection, _ in self._admitted:
            connection.close()
        self._listening.clear()
        self._visitors.clear()
        self._admitted.clear()
        self._epoll.close()

    def _serve(self, events: list[tuple[int, int]]) -> None:
        for fd, _ in events:
            if fd in self._visitors:
                self._proceed(fd)
        now = time.monotonic()
        while self._visitors and next(iter(self._visitors.values())).deadline <= now:
            self._drop(next(iter(self._visitors)))
        if self._resume_at is not None and now >= self._resume_at:
            self._resume_at = None
            self._listen_for(select.EPOLLIN)
        # New connections come last: they must not displace those that have just answered.
        for fd, _ in events:
            if fd in self._listening:
                self._accept(fd)

    def _accept(self, fd: int) -> None:
        for _ in range(MAX_ACCEPTED_PER_POLL):
            try:
                connection, peer = self._listening[fd].accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    self._make_room()
                    return
                if error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):
                    self._forget(fd)
                    return
                continue  # affects only that connection: it was reset before it was accepted
            self._add_pending(connection, str(peer[0]) if peer else "")

    def _add_pending(self, connection: socket.socket, address: str) -> None:
        connection.setblocking(False)
        fd = connection.fileno()
        same = self._of_address.setdefault(address, OrderedDict())
        if len(same) >= self._max_per_address:
            self._drop(next(iter(same)))
        elif len(self._visitors) >= self._max_pending:
            self._drop(next(iter(self._visitors)))
        run = HandshakeRun(connection, self._handshake(address))
        deadline = time.monotonic() + self._seconds
        self._visitors[fd] = _PendingConnection(run, address, deadline)
        self._of_address.setdefault(address, OrderedDict())[fd] = None
        if self._proceed(fd):
            self._epoll.register(fd, select.EPOLLIN)

    def _proceed(self, fd: int) -> bool:
        """Continue a handshake, and return whether it is still pending."""
        run = self._visitors[fd].run
        try:
            if not run.proceed():
                return True
        except (OSError, ValueError):
            self._drop(fd)
            return False
        self._remove(fd)
        self._admitted.append((run.connection, run.result))
        return False

    def _drop(self, fd: int) -> None:
        visitor = self._remove(fd)
        self.strangers.add(visitor.address)
        visitor.run.connection.close()

    def _remove(self, fd: int) -> _PendingConnection[T]:
        # Closing is not enough: a process that is being forked holds the same open file.
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        visitor = self._visitors.pop(fd)
        same = self._of_address[visitor.address]
        del same[fd]
        if not same:
            del self._of_address[visitor.address]
        return visitor

    def _make_room(self) -> None:
        """Handle a process without a free descriptor for another connection.

        Drop the oldest pending connection; if there is none, pause accepting.
        """
        if self._visitors:
            self._drop(next(iter(self._visitors)))
        else:
            self._listen_for(0)
            self._resume_at = time.monotonic() + ACCEPT_PAUSE_S

    def _listen_for(self, events: int) -> None:
        for fd in self._listening:
            self._epoll.modify(fd, events)

    def _forget(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        self._listening.pop(fd).close()
