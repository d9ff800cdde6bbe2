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

# Seconds for an agent to end its ranks. Then the agent is killed, and its rank server ends them.
END_TIMEOUT_S = 6.0
# Seconds after which a name without a listener is not an agent's: agents listen immediately.
NOT_LISTENING_S = 1.0
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
    began = listened = time.monotonic()
    means = [(END_TIMEOUT_S, signal.SIGKILL), (0.0, signal.SIGHUP)]
    while time.monotonic() - began < 2 * END_TIMEOUT_S:
        mine = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            mine.bind(address)
            mine.listen(8)  # connections are never accepted
            return mine
        except OSError:
            mine.close()
        due = bool(means) and time.monotonic() - began >= means[-1][0]
        try:
            if not _end(address, means.pop()[1] if due else None):
                return None
            listened = time.monotonic()
        except ConnectionRefusedError:
            if time.monotonic() - listened > NOT_LISTENING_S:
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
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        try:
            visitor.settimeout(1.0)
            visitor.connect(address)
            peer = visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            pid, uid, _ = _PEER.unpack(peer)
            if uid != os.getuid():
                return False
            if kind is not None:
                os.kill(pid, kind)
                os.kill(pid, signal.SIGCONT)  # a stopped process handles no signals
        except ConnectionRefusedError:
            raise
        except OSError:
            pass  # the process has ended meanwhile
    return True
