"""The memory that ranks of one host share: a file without a name, handed on over a socket.

It has no place in /dev/shm: it needs no room there, and nothing of it is left behind, however
ranks end. Rank 0 makes it and hands it to the others over a socket of the abstract namespace."""

import contextlib
import os
import secrets
import socket
import struct
import time
from typing import Any

WHERE = "where"  # in the store


def identity() -> str:
    """Of what shares memory this way: one kernel, and one network namespace on it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    except OSError as error:
        return f"unknown: {error.strerror} {socket.gethostname()} {os.getpid()}"


def shared(store: Any, rank: int, size: int, nbytes: int, timeout: float) -> int:
    """A descriptor of ``nbytes`` of memory, the same on all ranks of ``store``'s group.

    Raises OSError where there is not so much memory, or a rank does not come within ``timeout``
    seconds.
    """
    deadline = time.monotonic() + timeout
    return _made(store, size, nbytes, deadline) if rank == 0 else _taken(store, deadline)


def _made(store: Any, size: int, nbytes: int, deadline: float) -> int:
    name = f"paceline-{secrets.token_hex(16)}"
    with contextlib.ExitStack() as opened:
        try:
            fd = os.memfd_create("paceline", os.MFD_CLOEXEC)
            opened.callback(os.close, fd)
            os.posix_fallocate(fd, 0, nbytes)  # so that no rank finds out when it writes
            door = opened.enter_context(socket.socket(socket.AF_UNIX))
            door.bind(f"\0{name}")
            door.listen(max(size, 1024))  # others of the host may knock as well
        except OSError as error:
            store.set(WHERE, f"!{error.strerror}")
            raise
        store.set(WHERE, name)
        missing = size - 1
        while missing:
            door.settimeout(max(deadline - time.monotonic(), 0.001))
            visitor, _ = door.accept()
            with visitor:
                if _user(visitor) == os.getuid():
                    socket.send_fds(visitor, [b"."], [fd])
                    missing -= 1
        door.close()
        opened.pop_all()
    return fd


def _taken(store: Any, deadline: float) -> int:
    name = store.get(WHERE).decode()
    if name.startswith("!"):
        raise OSError(None, name[1:])
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(max(deadline - time.monotonic(), 0.001))
        _connect(door, f"\0{name}", deadline)
        if _user(door) != os.getuid():
            raise OSError(None, f"the memory offered is of user {_user(door)}")
        _, fds, _, _ = socket.recv_fds(door, 1, 1)
    if not fds:
        raise OSError(None, "rank 0 has handed on no memory")
    os.set_inheritable(fds[0], False)
    return fds[0]


def _connect(door: socket.socket, address: str, deadline: float) -> None:
    """Connect; where the queue is full, of strangers say, again until the deadline."""
    while True:
        try:
            door.connect(address)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _user(visitor: socket.socket) -> int:
    """Of the process at the other end."""
    told = visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", told)[1])
