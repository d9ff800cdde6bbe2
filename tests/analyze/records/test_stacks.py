"""The user frame of a stack, written by the process itself or read from outside."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import ranks

from paceline.analyze.records.stacks import (
    STACK_NOT_PERMITTED,
    innermost_user_frame,
    main_thread_frames,
)
from paceline.launch.monitor import rank_stacks
from paceline.record.ring.tail import process_state
from paceline.report.terminal.top import hang_report as told

# The process writes its stacks and stops. It can also run as a forked process, as ranks do.
STOPS = """
    import faulthandler, os, pathlib, signal, threading, time

    def deep(more):
        if more:
            deep(more - 1)
        else:
            threading.Thread(target=time.sleep, args=(100,), name='a "b"', daemon=True).start()
            faulthandler.dump_traceback(open("own", "w"))
            pathlib.Path("pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

    def inner(function):
        function(2)

    {forks}
    inner(deep)
"""


@pytest.mark.parametrize("forks", ["", "os.fork() and os.wait()"])
def test_stack_of_stopped_process_is_read_from_outside(tmp_path, forks):
    script = ranks.write(tmp_path, STOPS.format(forks=forks))
    command = [sys.executable, str(script)]
    number = tmp_path / "pid"
    child = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    try:
        ranks.wait_until(lambda: number.exists() and number.read_text(), 10)
        pid = int(number.read_text())
        ranks.wait_until(lambda: process_state(pid) == "T", 10)
        text = rank_stacks.read_memory({3: pid, 4: 2**22 + 1})[3]
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    own, read = main_thread_frames((tmp_path / "own").read_text()), main_thread_frames(text)
    assert [(frame.file, frame.function) for frame in read] == [
        *[(str(script), "deep")] * 3,
        (str(script), "inner"),
        (str(script), "<module>"),
    ]
    assert read[1:] == own[1:]
    assert read[0].line == own[0].line + 2
    assert "threading.py" in text.split("deep")[0]
    assert re.fullmatch(
        r"script\.py:\d+ in deep: os\.kill\(.*SIGSTOP\)", str(innermost_user_frame(text))
    )


def test_main_thread_is_identified_by_process_id():
    def thread(number, name, line):
        frames = [{"filename": "/t.py", "line": line, "name": "f"}]
        return {"thread_id": 9, "os_thread_id": number, "thread_name": name, "frames": frames}

    threads = [thread(7, None, 1), thread(8, "other", 2)]
    assert innermost_user_frame(rank_stacks.as_faulthandler(threads, 7)).line == 1
    assert innermost_user_frame(rank_stacks.as_faulthandler(threads, 8)).line == 2
    named = [thread(1, "MainThread", 3), thread(2, None, 4)]  # of another PID namespace
    assert innermost_user_frame(rank_stacks.as_faulthandler(named, 70)).line == 3
    assert innermost_user_frame(rank_stacks.as_faulthandler([], 70)) is None


def test_slow_stack_reader_times_out(tmp_path, monkeypatch):
    slow = tmp_path / "py-spy"
    slow.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\nexec sleep 100\n")
    slow.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda *_, **__: str(slow))
    monkeypatch.setattr(rank_stacks, "PY_SPY_TIMEOUT_S", 0.3)
    open_before, began = os.listdir("/proc/self/fd"), time.monotonic()
    assert rank_stacks.read_memory(dict.fromkeys(range(12), os.getpid())) == {}
    assert time.monotonic() - began < 1.5
    started = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert 1 <= len(started) <= rank_stacks.MAX_CONCURRENT
    assert [process_state(pid) for pid in started] == [""] * len(started)
    assert len(os.listdir("/proc/self/fd")) == len(open_before)


def test_missing_py_spy_and_missing_permission_are_reported(monkeypatch):
    lines = told(None, {0: STACK_NOT_PERMITTED, 1: ""}, set(), 3.0).splitlines()
    assert lines[-2] == "    rank 0: no record; its stack could not be read: not permitted"
    assert lines[-1] == "    rank 1: no record"
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    assert rank_stacks.read_memory({0: os.getpid()}) == {}
