"""Ensure that a job has one agent per node, even after a restart: a previous agent, which may still
hold the GPUs while the launcher can't reach it, is ended first.

The agent holds the name of an abstract Unix socket (no file); the kernel reports which process
holds a name that is taken.
"""

import os
import signal
import socket
import struct
import time

PATIENCE = 6.0  # s for an agent to end its ranks; it is killed after that, and its server ends them
NOT_LISTENING_S = 1.0  # then the name is no agent's: agents listen at once
_TRY = 0.05
_PEER = struct.Struct("iII")  # pid, uid, gid


def claim(run: str, place: int) -> socket.socket | None:
    """Become the only agent of the job ``run`` at this index among its nodes, while the returned
    socket is open; None if another user's process holds the name.
    """
    address = f"\0paceline-agent-{os.getuid()}-{run}-{place}"
    began = listened = time.monotonic()
    means = [(PATIENCE, signal.SIGKILL), (0.0, signal.SIGHUP)]
    while time.monotonic() - began < 2 * PATIENCE:
        mine = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            mine.bind(address)
            mine.listen(8)  # nobody is ever answered
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
    """Signal the process of ours that holds the name; whether it is no other user's.

    Raises:
        ConnectionRefusedError: Nobody listens under the name.
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
                os.kill(pid, signal.SIGCONT)  # one that is stopped hears nothing
        except ConnectionRefusedError:
            raise
        except OSError:
            pass  # it has gone meanwhile
    return True
