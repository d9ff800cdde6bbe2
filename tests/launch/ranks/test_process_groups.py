"""Signals reach the processes of the ranks and no others, and waiting for their end is bounded."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks

from paceline.launch.linux_processes import SET_NAME, prctl, signal_checked
from paceline.launch.ranks import process_groups
from paceline.launch.ranks.process_groups import RankGroups, end_children, end_remaining_children
from paceline.record.ring.tail import process_state

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")  # the next process gets the next free number


def forked(code):
    """Fork a process in a session of its own that runs ``code()``, and return its PID."""
    ready, started = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.write(started, b".")
        os._exit(code() or 0)
    os.read(ready, 1)
    os.close(ready)
    os.close(started)
    return pid


def exits_of(groups):
    found = []
    ranks.wait_until(lambda: found.extend(groups.take_exits()) or found)
    return found


def test_number_of_rank_that_exited_stays_reserved_until_its_group_is_killed():
    groups, pid = RankGroups(), forked(lambda: 3)
    groups.add(pid)
    assert exits_of(groups) == [(pid, 3, 0)]
    groups.reap_others()
    assert Path(f"/proc/{pid}").exists()  # a zombie
    groups.signal(pid, signal.SIGTERM, group=True)
    assert Path(f"/proc/{pid}").exists()
    groups.signal(pid, signal.SIGKILL, group=True)
    assert not Path(f"/proc/{pid}").exists()
    groups.signal(pid, signal.SIGKILL, group=True)  # nothing is signalled


def test_processes_that_rank_left_in_its_group_are_killed():
    reader, writer = os.pipe()

    def leave_child():
        if os.fork() == 0:
            signal.pause()

    groups, pid = RankGroups(), forked(leave_child)
    os.close(writer)
    groups.add(pid)
    exits_of(groups)
    groups.signal(pid, signal.SIGKILL, group=True)
    assert os.read(reader, 1) == b""  # no process holds the other end any more
    os.close(reader)


def test_killed_rank_is_reported_with_its_peak_memory():
    groups, pid = RankGroups(), forked(signal.pause)
    groups.add(pid)
    groups.signal(pid, signal.SIGKILL, group=True)
    ((exited, code, peak),) = exits_of(groups)
    assert (exited, code) == (pid, -signal.SIGKILL)
    assert peak > 1 << 20


ONE_EXITS = """
    import os, time
    if os.environ["RANK"] == "1":
        open("pid", "w").write(str(os.getpid()))
        raise SystemExit
    while not os.path.exists("go"):
        time.sleep(0.01)
    """


def is_gone(pid):
    return not process_state(pid)  # reaped, or a zombie


@pytest.mark.skipif(not os.access(LAST_PID, os.W_OK), reason="may not choose a process's number")
def test_process_that_gets_number_of_exited_rank_is_not_killed(tmp_path):
    script = ranks.write(tmp_path, ONE_EXITS)
    job = ranks.start(ranks.command(script), cwd=tmp_path)
    ranks.wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    ranks.wait_until(lambda: is_gone(pid))
    time.sleep(0.2)  # for the rank server to handle the exit
    others = []
    try:
        for _ in range(20):  # other processes may take the number
            LAST_PID.write_text(str(pid - 1))
            words = [sys.executable, "-c", "import signal; signal.pause()"]
            others.append(subprocess.Popen(words, start_new_session=True))
            if others[-1].pid == pid:
                break
        (tmp_path / "go").touch()
        assert job.wait(20) == 0
        assert all(other.poll() is None for other in others)
    finally:
        job.kill()
        for other in others:
            other.kill()
            other.wait()


def in_child(function):
    """Run a function in a forked process and return its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = function()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_process_that_does_not_end_is_named_and_left(monkeypatch, tmp_path):
    monkeypatch.setattr(process_groups, "KILL_TIMEOUT_S", 0.2)
    # A process in state D gets no signal: so does this one.
    monkeypatch.setattr(process_groups, "_kill", lambda pid, kind, group: None)

    def rank():
        name = ctypes.create_string_buffer(b"train\xc3")  # the kernel cuts names inside a letter
        prctl(SET_NAME, ctypes.addressof(name))
        (tmp_path / "named").touch()
        signal.pause()

    def launcher():
        sys.stderr = open(tmp_path / "said", "w")  # noqa: SIM115
        pid = forked(rank)
        ranks.wait_until((tmp_path / "named").exists)
        (tmp_path / "pid").write_text(str(pid))
        end_remaining_children()
        sys.stderr.flush()
        os.kill(pid, signal.SIGKILL)
        return 5

    assert in_child(launcher) == 5
    pid, said = (tmp_path / "pid").read_text(), (tmp_path / "said").read_text()
    assert said.startswith(f"paceline: process {pid} (train\ufffd, state S) has not ended")
    assert "HINT: in state D, it waits in the kernel for a device or file system" in said


def test_children_that_ignore_sigterm_are_ended():
    def stubborn():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pause()

    def parent():
        forked(signal.pause)
        forked(stubborn)
        return len(end_children(0.1))

    assert in_child(parent) == 0


def test_signal_is_not_sent_if_process_is_another():
    pid = forked(signal.pause)
    try:
        assert not signal_checked(pid, [signal.SIGKILL], lambda: False)
        assert process_state(pid)
        assert signal_checked(pid, [signal.SIGKILL], lambda: True)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert not signal_checked(pid, [signal.SIGKILL], lambda: True)
