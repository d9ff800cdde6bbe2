"""The memory that the ranks of one host share: a file without a name, passed over a socket.

It is not in /dev/shm: it needs no space there, and nothing is left behind, however the ranks end.
Rank 0 creates the file and sends its descriptor to the other ranks over a socket of the abstract
namespace.
"""

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import time
from typing import Any

SOCKET_NAME_KEY = "where"  # in the store
MAX_PENDING_CONNECTIONS = 1024  # other processes of the host may connect as well
_FLOCK_FORMAT = "hhqqi"
MAX_WAIT_S = 1e6  # of one call: Python passes a socket's timeout on as 32 bits of milliseconds


def sharing_domain() -> str:
    """Return a text that is equal for processes that can share memory this way.

    They run on the same kernel, in the same network namespace. They must also be of one user.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError as error:
        return f"unknown: {error.strerror} {socket.gethostname()} {os.getpid()}"


def open_shared_memory(store: Any, rank: int, size: int, nbytes: int, timeout: float) -> int:
    """Return a descriptor of ``nbytes`` of memory that all ranks of ``store``'s group share.

    Raises OSError where there is not enough memory, or a rank does not come within ``timeout``
    seconds.
    """
    deadline = time.monotonic() + timeout
    return (
        _create_and_send(store, size, nbytes, deadline) if rank == 0 else _receive(store, deadline)
    )


def _create_and_send(store: Any, size: int, nbytes: int, deadline: float) -> int:
    name = f"paceline-{secrets.token_hex(16)}"
    with contextlib.ExitStack() as cleanup:
        try:
            fd = os.memfd_create("paceline", os.MFD_CLOEXEC)
            cleanup.callback(os.close, fd)
            os.posix_fallocate(fd, 0, nbytes)  # fails here, not with a SIGBUS in a rank that writes
            listener = cleanup.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(f"\0{name}")
            listener.listen(max(size, MAX_PENDING_CONNECTIONS))
        except OSError as error:
            store.set(SOCKET_NAME_KEY, f"!{error.strerror}")
            raise
        store.set(SOCKET_NAME_KEY, name)
        missing = size - 1
        while missing:
            listener.settimeout(_seconds_left(deadline))
            peer, _ = listener.accept()
            with peer:
                if _peer_uid(peer) == os.getuid():
                    socket.send_fds(peer, [b"."], [fd])
                    missing -= 1
        listener.close()
        cleanup.pop_all()
    return fd


def _receive(store: Any, deadline: float) -> int:
    name = store.get(SOCKET_NAME_KEY).decode()
    if name.startswith("!"):
        raise OSError(None, name[1:])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_seconds_left(deadline))
        _connect(connection, f"\0{name}", deadline)
        if _peer_uid(connection) != os.getuid():
            raise OSError(None, f"the shared memory belongs to user {_peer_uid(connection)}")
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
    if not fds:
        raise OSError(None, "rank 0 sent no shared memory")
    os.set_inheritable(fds[0], False)
    return fds[0]


def _seconds_left(deadline: float) -> float:
    return min(max(deadline - time.monotonic(), 0.001), MAX_WAIT_S)


def _connect(connection: socket.socket, address: str, deadline: float) -> None:
    """Connect; retry until the deadline while the queue is full, for instance of strangers."""
    while True:
        try:
            connection.connect(address)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _peer_uid(connection: socket.socket) -> int:
    """Return the user ID of the process at the other end."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    return int(struct.unpack("3i", credentials)[1])


def listen_at(address: str) -> socket.socket:
    """Return a socket for messages in the abstract namespace, whose ``accept`` never waits."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{address}")
        listener.listen(MAX_PENDING_CONNECTIONS)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def connect_to(address: str) -> socket.socket:
    """Return a connection to a process of the same user; raises OSError for another one."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"\0{address}")
        if _peer_uid(connection) != os.getuid():
            raise OSError(None, f"its receiver runs as user {_peer_uid(connection)}")
    except OSError:
        connection.close()
        raise
    return connection


def accept_own_user(listener: socket.socket) -> socket.socket | None:
    """Return a new connection; refuse those of other users. None where there is none."""
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return None
        if _peer_uid(connection) == os.getuid():
            return connection
        connection.close()


def is_alive(fd: int, rank: int) -> bool:
    """Return whether the process of another rank lives: it holds the lock on its byte."""
    request = struct.pack(_FLOCK_FORMAT, fcntl.F_WRLCK, 0, rank, 1, 0)
    answer = struct.unpack(_FLOCK_FORMAT, fcntl.fcntl(fd, fcntl.F_GETLK, request))
    return bool(answer[0] != fcntl.F_UNLCK)
