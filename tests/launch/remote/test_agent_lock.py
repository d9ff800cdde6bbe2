"""The lock that allows one agent per job and host, when another process holds its name."""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid

import pytest
import ranks
import users

from paceline.launch import host_agent
from paceline.launch.host_agent import HeldByOtherUserError, acquire_agent_lock

# Holds the name with a queue of connections that is full.
SQUATS = """
import socket, sys
name, listens = "\\0" + sys.argv[1], sys.argv[2] == "True"
squatter = socket.socket(socket.AF_UNIX)
squatter.bind(name)
if listens:
    squatter.listen(0)
    held = [socket.socket(socket.AF_UNIX) for _ in range(4)]
    for one in held:
        one.setblocking(False)
        one.connect_ex(name)
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("listens", [False, True])
def test_name_held_by_another_user_is_not_waited_for(listens):
    run = uuid.uuid4().hex
    name = f"paceline-agent-{os.getuid()}-{run}-0"
    words = (users.ATTACKER, sys.executable, "-c", SQUATS, name, listens)
    with users.start(*words, stdin=subprocess.PIPE) as other:
        other.stdout.readline()
        begun = time.monotonic()
        with pytest.raises(HeldByOtherUserError):
            acquire_agent_lock(run, 0)
        assert time.monotonic() - begun < host_agent.PREVIOUS_AGENT_TIMEOUT_S / 2
        other.communicate("")
    acquire_agent_lock(run, 0).close()


def test_nobody_can_connect_to_the_lock():
    run = uuid.uuid4().hex
    held, stranger = acquire_agent_lock(run, 0), socket.socket(socket.AF_UNIX)
    with held, stranger, pytest.raises(ConnectionRefusedError):
        stranger.connect(f"\0paceline-agent-{os.getuid()}-{run}-0")


HOLDS = """
    import os, signal, sys
    from paceline.launch.host_agent import acquire_agent_lock
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    lock = acquire_agent_lock(sys.argv[1], 0)
    child = os.fork()
    if child:  # the child is not the agent: it ends with it
        open("holds", "w").close()
    signal.pause()
    """


def test_previous_agent_that_does_not_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(host_agent, "PREVIOUS_AGENT_TIMEOUT_S", 1.5)
    run = uuid.uuid4().hex
    script = ranks.write(tmp_path, HOLDS.replace("    child = os.fork()\n", "    child = 1\n"))
    previous = subprocess.Popen([sys.executable, str(script), run], cwd=tmp_path)
    try:
        ranks.wait_until((tmp_path / "holds").exists)
        acquire_agent_lock(run, 0).close()
        assert previous.wait(5) == -signal.SIGKILL
    finally:
        previous.kill()
        previous.wait()


def test_holder_is_the_process_that_was_not_forked(tmp_path):
    run = uuid.uuid4().hex
    script = ranks.write(tmp_path, HOLDS)
    previous = subprocess.Popen([sys.executable, str(script), run], cwd=tmp_path, process_group=0)
    try:
        ranks.wait_until((tmp_path / "holds").exists)
        inode = host_agent._socket_inode(f"paceline-agent-{os.getuid()}-{run}-0")
        assert host_agent._socket_holder(inode) == previous.pid
    finally:
        os.killpg(previous.pid, signal.SIGKILL)
        previous.wait()
