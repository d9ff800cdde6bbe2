"""The lock that allows one agent per job and host, when another process holds its name."""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid

import ranks

from paceline.launch.remote import agent_lock
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


HOLDS = """
    import signal, sys
    from paceline.launch.remote.agent_lock import acquire
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    lock = acquire(sys.argv[1], 0)
    open("holds", "w").close()
    signal.pause()
    """


def test_previous_agent_that_does_not_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_lock, "END_TIMEOUT_S", 1.5)
    run = uuid.uuid4().hex
    script = ranks.write(tmp_path, HOLDS)
    previous = subprocess.Popen([sys.executable, str(script), run], cwd=tmp_path)
    try:
        ranks.wait_until((tmp_path / "holds").exists)
        mine = acquire(run, 0)
        assert mine is not None
        mine.close()
        assert previous.wait(5) == -signal.SIGKILL
    finally:
        previous.kill()
        previous.wait()
