"""The lock of a folder that one run uses: who has it, and when it is free again."""

import os
import subprocess
import sys

import pytest
import ranks

from paceline.security import run_lock
from paceline.security.run_lock import FolderInUseError, RunLock

HOLD = """
import sys
from pathlib import Path
from paceline.security.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]), "checkpoint", "first")
lock.acquire(print)
print("has it", flush=True)
sys.stdin.read()
lock.release()
"""


@pytest.fixture
def holder(tmp_path):
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "has it\n"
    yield process
    process.kill()
    process.communicate()


def acquire(folder, run):
    said = []
    lock = RunLock(folder, "checkpoint", run)
    lock.acquire(said.append)
    return lock, said


def test_running_run_keeps_others_out_until_it_ends(tmp_path, holder):
    with pytest.raises(FolderInUseError, match=rf"in use by run first \(process {holder.pid} on"):
        acquire(tmp_path, "second")
    with pytest.raises(FolderInUseError, match=r"HINT: .*rm .*paceline-run\.json"):
        acquire(tmp_path, "first")  # the same id, but its process still runs
    holder.kill()
    holder.wait()
    lock, said = acquire(tmp_path, "second")
    assert said == []
    lock.release()
    assert os.listdir(tmp_path) == []


def test_run_that_ends_removes_its_lock_and_leaves_that_of_another(tmp_path, holder):
    os.unlink(tmp_path / run_lock.NAME)  # as the error proposes
    lock, _ = acquire(tmp_path, "second")
    holder.communicate("")
    assert os.listdir(tmp_path) == [run_lock.NAME]
    lock.release()
    assert os.listdir(tmp_path) == []


def test_run_on_another_node_has_the_lock_as_long_as_it_renews_it(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(run_lock, "kernel_id", lambda _: "another kernel")
    monkeypatch.setattr(run_lock, "POLL_INTERVAL_S", 0.01)
    path = tmp_path / run_lock.NAME
    polls = []

    def renew(seconds):
        polls.append(seconds)
        if len(polls) == 3:
            os.utime(path, (1e9, 1e9))

    monkeypatch.setattr(run_lock.time, "sleep", renew)
    with pytest.raises(FolderInUseError, match="in use by run first"):
        acquire(tmp_path, "second")
    assert len(polls) == 3
    monkeypatch.setattr(run_lock.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(run_lock, "EXPIRY_S", 0.2)
    os.utime(path)
    lock, said = acquire(tmp_path, "second")  # not renewed
    assert len(said) == 1
    assert "waits up to" in said[0]
    lock.release()


def test_next_attempt_of_the_run_on_another_node_does_not_wait(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(run_lock, "kernel_id", lambda _: "another kernel")
    lock, said = acquire(tmp_path, "first")
    assert said == []
    lock.release()


def test_holder_is_warned_when_another_run_takes_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "RENEWAL_INTERVAL_S", 0.01)
    lock, _ = acquire(tmp_path, "first")
    warnings = []
    os.utime(tmp_path / run_lock.NAME, (1e9, 1e9))
    lock.keep(warnings.append)
    ranks.wait_until(lambda: (tmp_path / run_lock.NAME).stat().st_mtime > 1e9)
    (tmp_path / run_lock.NAME).write_text('{"run": "second", "host": "b", "pid": 7}')
    ranks.wait_until(lambda: warnings)
    assert "now also used by run second (process 7 on b)" in warnings[0]
    lock.release()
    assert (tmp_path / run_lock.NAME).exists()
