"""The lock that allows one agent per job and host, when another user's process holds its name."""

import os
import socket
import time
import uuid

from paceline.launch.remote.agent_lock import acquire


def test_acquire_gives_up_quickly_if_socket_does_not_listen():
    run = uuid.uuid4().hex
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(f"\0paceline-agent-{os.getuid()}-{run}-0")
        begun = time.monotonic()
        assert acquire(run, 0) is None
        assert time.monotonic() - begun < 3.0
    mine = acquire(run, 0)
    assert mine is not None
    mine.close()
