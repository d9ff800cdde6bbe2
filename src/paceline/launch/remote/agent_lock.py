"""Lock that ensures that a job has one agent per node, even after a restart.

A previous agent, which may still occupy the GPUs while the launcher can't reach it, is ended first.
The lock is the name of an abstract Unix socket (no file), which nobody can connect to. The kernel
lists the inode of each name, and each process of this user shows the inodes of its sockets: the
holder is found without its help, and without that of other users.
"""

import contextlib
import os
import random
import signal
import socket
import time
from pathlib import Path

from ...security.handshake import DROPPED_CONNECTION_ERRORS
from ...security.processes import start_ticks
from ..channel import Channel, connect_channel
from ..linux_processes import signal_checked

# Seconds for an agent to end its ranks. Then the agent is killed, and its rank server ends them.
END_TIMEOUT_S = 6.0
_TRY = 0.05  # seconds between two attempts
_SOCKETS = Path("/proc/net/unix")


# Connection from an agent to its launcher, which may be busy with other connections.

CONNECT_SECONDS = 5.0  # timeout for each address of the launcher
PATIENCE_SECONDS = 25.0  # until the last attempt, if the launcher drops connections or is silent
REFUSED_SECONDS = 1.0  # until the last attempt, if all addresses refuse the connection
FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.1, 2.0  # between attempts; doubled each time


class LauncherNotFoundError(Exception):
    """The agent could not connect to any address of the launcher.

    Attributes:
        tried: Error message, by address.
        dropped: Whether a connection was made and dropped during the handshake.
    """

    def __init__(self, tried: dict[str, str], dropped: bool) -> None:
        super().__init__("; ".join(f"{address}: {why}" for address, why in tried.items()))
        self.tried, self.dropped = tried, dropped


def connect_to_launcher(where: str, secret: str) -> Channel:
    """Connect to the launcher by one of its addresses, and retry if it drops the connection.

    Args:
        where: The addresses in the form ``ADDRESS,PORT;ADDRESS,PORT`` (``AgentListener.where``).
        secret: The job's secret.

    Raises:
        LauncherNotFoundError: No process listens on the addresses, or none that knows the secret.
    """
    begun = answered = time.monotonic()
    wait, dropped = FIRST_WAIT_SECONDS, False
    tried: dict[str, str] = {}
    while True:
        for pair in where.split(";"):
            address, _, port = pair.rpartition(",")
            try:
                return connect_channel(address, int(port), secret, CONNECT_SECONDS)
            except OSError as error:
                tried[address] = error.strerror or str(error)
                dropped = dropped or isinstance(error, DROPPED_CONNECTION_ERRORS)
                if isinstance(error, (*DROPPED_CONNECTION_ERRORS, TimeoutError)):
                    answered = time.monotonic()
        now = time.monotonic()
        if now - begun > PATIENCE_SECONDS or now - answered > REFUSED_SECONDS:
            raise LauncherNotFoundError(tried, dropped)
        # Random, so that not all dropped agents reconnect at the same time.
        time.sleep(wait * random.uniform(0.5, 1.0))
        wait = min(2 * wait, MAX_WAIT_SECONDS)


class HeldByOtherUserError(Exception):
    """A process of another user has the name of the lock."""


def acquire(run: str, place: int) -> socket.socket:
    """Make this process the only agent of a job on a node.

    Args:
        run: ID of the run.
        place: Index of the node in the job.

    Returns:
        The socket that holds the lock as long as it is open.

    Raises:
        HeldByOtherUserError: Another user's process holds the name. It is not waited for.
        ValueError: The previous agent can't be ended.
    """
    name = f"paceline-agent-{os.getuid()}-{run}-{place}"
    began, holder = time.monotonic(), 0
    means = [(END_TIMEOUT_S, signal.SIGKILL), (0.0, signal.SIGHUP)]
    while time.monotonic() - began < 2 * END_TIMEOUT_S:
        mine = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            mine.bind(f"\0{name}")
            return mine
        except OSError:
            mine.close()
        inode = _inode(name)
        if inode is not None:  # else the name is free by now
            holder = _holder(inode)
            if means and time.monotonic() - began >= means[-1][0]:
                _, kind = means.pop()
                _end(holder, kind, name)
        time.sleep(_TRY)
    raise ValueError(
        f"the previous agent of this job on {socket.gethostname()} (process {holder}) can't be "
        "ended. HINT: end it, or leave the node out"
    )


def _end(pid: int, kind: signal.Signals, name: str) -> None:
    """Send a signal to the process, if it still holds the name."""

    def holds() -> bool:
        inode = _inode(name)
        return inode is not None and _holder(inode) == pid

    with contextlib.suppress(OSError, HeldByOtherUserError):
        # A stopped process handles no signals before SIGCONT.
        signal_checked(pid, [kind, signal.SIGCONT], holds)


def _inode(name: str) -> int | None:
    """Return the inode of the socket that has an abstract name; None if there is none.

    Raises:
        HeldByOtherUserError: The system does not list its sockets.
    """
    end = f" @{name}\n".encode()
    try:
        with _SOCKETS.open("rb") as lines:
            found = [int(line.split()[6]) for line in lines if line.endswith(end)]
    except OSError:
        raise HeldByOtherUserError from None
    return max(found, default=None)


def _holder(inode: int) -> int:
    """Return the PID of this user's process that holds a socket, the oldest if it was forked.

    Raises:
        HeldByOtherUserError: No other process of this user holds it.
    """
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        pid = int(entry.name)
        with contextlib.suppress(OSError):  # a process of another user, or one that has ended
            is_own = entry.stat().st_uid == os.geteuid()
            if is_own and _has_socket(pid, inode) and (ticks := start_ticks(pid)):
                found.append((ticks, pid))
    if not found:
        raise HeldByOtherUserError
    return min(found)[1]


def _has_socket(pid: int, inode: int) -> bool:
    folder = f"/proc/{pid}/fd"
    wanted = f"socket:[{inode}]"
    for fd in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"{folder}/{fd}") == wanted:
                return True
    return False
