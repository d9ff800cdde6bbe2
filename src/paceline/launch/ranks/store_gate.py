"""The store of a job, behind a gate that admits only processes of the job's user.

PyTorch's TCPStore serves everyone who connects. Here it listens on an address of loopback where the
kernel drops all connections that are not signed with a key, which only the gate has. The gate
listens at the address that the ranks know. It asks the kernel which user holds the other end of a
connection; for a connection from another node, the agent of that node asks its kernel. It closes
the connections of other users at once, and passes on the bytes of the others. Ranks connect to it
as to a TCPStore.
"""

import contextlib
import datetime
import itertools
import os
import resource
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...comm.reachable_address import check_loopback, listen_on
from .connection_owner import Endpoint, connection_owner

# Ask the agents of other nodes whether a connection (number, other end, own end) is of the job's
# user; the answer is ``StoreGate.answer``.
AskAgents = Callable[[int, Endpoint, Endpoint], None]

MAX_ACCEPTED_PER_POLL = 64  # then admitted connections are served again
MAX_PENDING = 1024  # connections whose agent was asked and has not answered
MAX_PENDING_PER_ADDRESS = 256
PENDING_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0  # within this process
OPEN_TIMEOUT_S = 15.0  # of the store's own connection to the gate
STORE_TIMEOUT_S = 60.0  # of the launcher's calls
OPEN_DESCRIPTORS = 32  # of a store and its gate without ranks, with a reserve
READ_BYTES = 1 << 18
MAX_WAITING_BYTES = 4 << 20  # that one side has sent and the other has not read
FIND_ADDRESS_ATTEMPTS = 16
_TCP_MD5SIG_EXT, _TCP_MD5SIG_FLAG_PREFIX = 32, 1
SIGNATURE_KEY_BYTES = 80  # the most that the kernel takes
_CLOSE_AT_ONCE = struct.pack("ii", 1, 0)  # linger: the other side gets an error, no end of file


def open_store(
    address: str,
    port: int,
    ask_agents: AskAgents | None = None,
    report: Callable[[str], object] | None = None,
) -> tuple[Any, "StoreGate"]:
    """Open a TCPStore behind a gate that listens on an address and port (0: any free port).

    Args:
        ask_agents: Called for a connection from another node; None: such connections are refused.
        report: Prints a message, in the thread of the gate; None: to standard error.

    Raises:
        OSError: The address can't be listened on; with EADDRINUSE: the port is in use.
        ValueError: The store can't be reached from this process.
    """
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (limit, limit)
    )  # each rank takes several descriptors
    check_loopback()
    _check_descriptors(limit)
    import torch
    from torch._C._distributed_c10d import TCPStore

    report = report or sys.stderr.write
    gate_socket = listen_on(address, port)
    port = gate_socket.getsockname()[1]
    key = secrets.token_bytes(SIGNATURE_KEY_BYTES)
    try:
        store_socket = _listen_hidden(port, key, report)
    except OSError:
        gate_socket.close()
        raise
    # TCPStore wants the port of its own socket, and connects there, to this address: to the gate.
    gate: StoreGate | None = None
    deadline: threading.Timer | None = None
    try:
        gate = StoreGate(gate_socket, store_socket, key, ask_agents, report)
        # TCPStore has no time limit for the answer: end its connection
        deadline = threading.Timer(OPEN_TIMEOUT_S, gate.close)
        deadline.daemon = True
        deadline.start()
        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=OPEN_TIMEOUT_S),
            master_listen_fd=os.dup(store_socket.fileno()),
            use_libuv=torch.__version__ >= "2.11",  # before, libuv's takes no socket
        )
    except BaseException as error:
        if gate is not None:
            gate.close()
        if not isinstance(error, RuntimeError):
            raise
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"the store of the job at {address}, port {port}, can't be reached from its own node "
            f"within {OPEN_TIMEOUT_S:.0f} s: {reason}. HINT: a firewall must permit connections "
            "from this node to itself; check ulimit -u and ulimit -v"
        ) from error
    finally:
        if deadline is not None:
            deadline.cancel()
    store.set_timeout(datetime.timedelta(seconds=STORE_TIMEOUT_S))
    return store, gate


def _check_descriptors(limit: int) -> None:
    """Raise ValueError where no files can be opened: PyTorch would wait for its time limit."""
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(OPEN_DESCRIPTORS):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            raise ValueError(
                f"the store of the job can't be opened: {error.strerror}; the limit of a process "
                f"is {limit} (ulimit -Hn). HINT: start the job with a higher limit"
            ) from None


def _listen_hidden(port: int, key: bytes, report: Callable[[str], object]) -> socket.socket:
    """Return a socket that listens on an address of loopback for connections that have the key."""
    attempts = itertools.count(1)
    while True:
        hidden = socket.socket()
        try:
            if problem := _require_signatures(hidden, key):
                report(
                    "paceline: other users of this node can connect to the store of the job, "
                    f"because the kernel does not sign TCP connections ({problem}). HINT: use "
                    "nodes that no other users share, or a kernel with CONFIG_TCP_MD5SIG\n"
                )
            octets = ".".join(str(1 + secrets.randbelow(254)) for _ in range(3))
            hidden.bind((f"127.{octets}", port))
            hidden.listen(4096)
            hidden.setblocking(False)
            return hidden
        except OSError:  # another program listens on this port of all addresses
            hidden.close()
            if next(attempts) == FIND_ADDRESS_ATTEMPTS:
                raise


def _require_signatures(endpoint: socket.socket, key: bytes) -> str:
    """Have the kernel sign what this socket sends, and drop what is not signed with the same key.

    This is the MD5 signature of TCP (RFC 2385), which covers the first packet of a connection.
    Return the reason where the kernel can't.
    """
    any_address = struct.pack("=HH4s", socket.AF_INET, 0, bytes(4)).ljust(128, b"\0")
    option = any_address + struct.pack("=BBHi80s", _TCP_MD5SIG_FLAG_PREFIX, 0, len(key), 0, key)
    try:
        endpoint.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, option)
    except OSError as error:
        return error.strerror or str(error)
    return ""


@dataclass
class _Side:
    """One of the two connections of a rank: to the gate, and from the gate to the store."""

    connection: socket.socket
    other: "_Side | None" = None
    waiting: bytearray = field(default_factory=bytearray)  # to be sent to this side
    events: int = selectors.EVENT_READ


@dataclass
class _Pending:
    connection: socket.socket
    address: str
    deadline: float


class StoreGate:
    """Admit connections to the store, and pass their bytes on, in one thread.

    Args:
        listening: Where the ranks connect.
        store: Socket on which the store listens.
        key: Key with which connections to it have to be signed.
        ask_agents: As for ``open_store``.
        report: As for ``open_store``.
    """

    def __init__(
        self,
        listening: socket.socket,
        store: socket.socket,
        key: bytes,
        ask_agents: AskAgents | None,
        report: Callable[[str], object],
    ) -> None:
        self._listening, self._store, self._key = listening, store, key
        self._ask_agents, self._report = ask_agents, report
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._pending: OrderedDict[int, _Pending] = OrderedDict()  # in the order of accept
        self._pending_by_address: Counter[str] = Counter()
        self._answers: deque[tuple[int, bool]] = deque()
        self._refused: Counter[str] = Counter()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="paceline-store", daemon=True)
        self._thread.start()

    def answer(self, number: int, is_of_user: bool) -> None:
        """Take an agent's answer about a connection. May be called from any thread."""
        self._answers.append((number, is_of_user))
        self._wake()

    def close(self) -> None:
        """Close all connections, and wait for the thread."""
        self._closing = True
        self._wake()
        self._thread.join()
        for connection in (self._wake_in, self._wake_out):
            connection.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes up anyway
            self._wake_in.send(b".")

    def _serve(self) -> None:
        try:
            while not self._closing:
                events = self._selector.select(1.0 if self._pending else None)
                for key, ready in events:
                    if isinstance(key.data, _Side):
                        self._relay(key.data, ready)
                self._take_answers()
                # New connections come last: they must not delay those of the ranks.
                if any(key.fileobj is self._listening for key, _ in events):
                    self._accept()
        finally:
            for key in list(self._selector.get_map().values()):
                if key.fileobj is not self._wake_out:
                    key.fileobj.close()  # type: ignore[union-attr]
            for pending in self._pending.values():
                pending.connection.close()
            self._store.close()
            self._selector.close()

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED_PER_POLL):
            try:
                connection, peer = self._listening.accept()
            except BlockingIOError:
                return
            except OSError:  # it was reset, or there are no descriptors: the others go on
                if not self._drop_oldest():
                    time.sleep(0.01)
                return
            connection.setblocking(False)
            try:
                self._examine(connection, peer[:2], connection.getsockname()[:2])
            except OSError:
                connection.close()

    def _examine(self, connection: socket.socket, peer: Endpoint, own: Endpoint) -> None:
        owner = connection_owner(peer, own)
        if owner == os.geteuid():
            self._admit(connection)
        elif owner is not None or self._ask_agents is None or peer[0] == own[0]:
            where = f"user {owner} of this node" if owner is not None else peer[0]
            self._refuse(connection, where)
        else:
            if self._pending_by_address[peer[0]] >= MAX_PENDING_PER_ADDRESS:
                self._drop(next(n for n, p in self._pending.items() if p.address == peer[0]))
            elif len(self._pending) >= MAX_PENDING:
                self._drop_oldest()
            # random: a late answer to the gate of the last attempt fits no connection of this one
            number, deadline = secrets.randbits(48), time.monotonic() + PENDING_TIMEOUT_S
            self._pending[number] = _Pending(connection, peer[0], deadline)
            self._pending_by_address[peer[0]] += 1
            self._ask_agents(number, peer, own)

    def _take_answers(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(4096)
        while self._answers:
            number, is_of_user = self._answers.popleft()
            if number not in self._pending:
                continue  # timed out
            pending = self._take_pending(number)
            if is_of_user:
                self._admit(pending.connection)
            else:
                self._refuse(pending.connection, pending.address)
        now = time.monotonic()
        while self._pending and next(iter(self._pending.values())).deadline < now:
            self._drop_oldest()

    def _drop_oldest(self) -> bool:
        """Refuse the connection that has waited longest; return whether there was one."""
        if self._pending:
            self._drop(next(iter(self._pending)))
            return True
        return False

    def _drop(self, number: int) -> None:
        pending = self._take_pending(number)
        self._refuse(pending.connection, pending.address)

    def _take_pending(self, number: int) -> _Pending:
        pending = self._pending.pop(number)
        self._pending_by_address[pending.address] -= 1
        if not self._pending_by_address[pending.address]:
            del self._pending_by_address[pending.address]
        return pending

    def _refuse(self, connection: socket.socket, where: str) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSE_AT_ONCE)
        connection.close()
        self._refused[where] += 1
        if self._refused[where] == 1 and len(self._refused) <= 4:
            self._report(f"paceline: {where} connected to the store of the job, and was refused\n")

    def _admit(self, connection: socket.socket) -> None:
        """Connect to the store for a rank."""
        to_store = socket.socket()
        try:
            _require_signatures(to_store, self._key)
            to_store.settimeout(CONNECT_TIMEOUT_S)
            to_store.connect(self._store.getsockname())
            to_store.setblocking(False)
        except OSError:  # no descriptors
            to_store.close()
            connection.close()
            return
        rank, store = _Side(connection), _Side(to_store)
        rank.other, store.other = store, rank
        for side in (rank, store):
            side.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(side.connection, side.events, side)

    def _relay(self, side: _Side, ready: int) -> None:
        """Send what waits for this side, and pass on what it has sent."""
        other = side.other
        if other is None:
            return  # closed by an earlier event
        try:
            if ready & selectors.EVENT_WRITE:
                del side.waiting[: _send(side.connection, side.waiting)]
            if ready & selectors.EVENT_READ:
                data = side.connection.recv(READ_BYTES)
                if not data:
                    self._close(side)
                    return
                sent = 0 if other.waiting else _send(other.connection, data)
                if sent < len(data):
                    other.waiting += data[sent:]
        except BlockingIOError:
            return
        except OSError:
            self._close(side)
            return
        if side.waiting or other.waiting or side.events != other.events:
            self._choose_events(side, other)
            self._choose_events(other, side)

    def _choose_events(self, side: _Side, other: _Side) -> None:
        """Wait for room where bytes wait for this side; stop reading while the other is behind."""
        events = selectors.EVENT_WRITE if side.waiting else 0
        if len(other.waiting) < MAX_WAITING_BYTES:
            events |= selectors.EVENT_READ
        if events == side.events:
            return
        if not side.events:
            self._selector.register(side.connection, events, side)
        elif not events:
            self._selector.unregister(side.connection)
        else:
            self._selector.modify(side.connection, events, side)
        side.events = events

    def _close(self, side: _Side) -> None:
        for end in (side, side.other):
            assert end is not None
            if end.events:
                self._selector.unregister(end.connection)
            end.connection.close()
        if side.other is not None:
            side.other.other = None
        side.other = None


def _send(connection: socket.socket, data: bytes | bytearray) -> int:
    """Send what can be sent without waiting; return the number of bytes."""
    try:
        return connection.send(data)
    except BlockingIOError:
        return 0
