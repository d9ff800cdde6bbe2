"""Lock that ensures that a job has one agent per node, even after a restart.

A previous agent, which may still occupy the GPUs while the launcher can't reach it, is ended first.
The lock is the name of an abstract Unix socket (no file). The kernel reports which process holds a
name.
"""

import os
import signal
import socket
import struct
import time

from ..process_signals import signal_checked

# Seconds for an agent to end its ranks. Then the agent is killed, and its rank server ends them.
END_TIMEOUT_S = 6.0
# Seconds after which a name without a listener is not an agent's: agents listen immediately.
NOT_LISTENING_S = 1.0
MAX_CONNECTIONS = 64  # that later agents make to find the holder; they are never accepted
_TRY = 0.05  # seconds between two attempts
_PEER = struct.Struct("iII")  # pid, uid, gid


def acquire(run: str, place: int) -> socket.socket | None:
    """Make this process the only agent of a job on a node.

    Args:
        run: ID of the run.
        place: Index of the node in the job.

    Returns:
        The socket that holds the lock as long as it is open. None if another user's process holds
        the name, or the previous agent can't be ended.
    """
    address = f"\0paceline-agent-{os.getuid()}-{run}-{place}"
    began, has_holder = time.monotonic(), False
    means = [(END_TIMEOUT_S, signal.SIGKILL), (0.0, signal.SIGHUP)]
    while time.monotonic() - began < 2 * END_TIMEOUT_S:
        mine = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            mine.bind(address)
            mine.listen(MAX_CONNECTIONS)
            return mine
        except OSError:
            mine.close()
        due = bool(means) and time.monotonic() - began >= means[-1][0]
        try:
            # Each connection takes a place in the holder's queue: no more than are needed.
            if (due or not has_holder) and not _end(address, means[-1][1] if due else None):
                return None
            has_holder = True
            if due:
                means.pop()
        except ConnectionRefusedError:
            if not has_holder and time.monotonic() - began > NOT_LISTENING_S:
                return None
        time.sleep(_TRY)
    return None


def _end(address: str, kind: signal.Signals | None) -> bool:
    """Send signal ``kind``, if any, to the process that holds the name, if it is this user's.

    Returns:
        False if the process belongs to another user.

    Raises:
        ConnectionRefusedError: No process listens under the name.
    """
    try:
        pid, uid = _holder(address)
        if uid != os.getuid():
            return False
        if kind is not None:
            # A stopped process handles no signals before SIGCONT.
            signal_checked(
                pid, [kind, signal.SIGCONT], lambda: _holder(address) == (pid, os.getuid())
            )
    except ConnectionRefusedError:
        raise
    except OSError:
        pass  # the process has ended meanwhile
    return True


def _holder(address: str) -> tuple[int, int]:
    """Return PID and UID of the process that listens under the name.

    Raises:
        OSError: There is none (ConnectionRefusedError), or it does not accept connections.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        visitor.settimeout(1.0)
        visitor.connect(address)
        peer = visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        pid, uid, _ = _PEER.unpack(peer)
        return pid, uid
