"""Failures of C libraries in ``paceline pack``: reported in one line, nothing is left behind."""

import os
import signal
import subprocess
import sys
import time

import pytest

FRAME = """
import os, re, signal, sys, time, typer
from paceline.cli.common import base, guarded_process
guarded_process.HUNG_S, guarded_process.LOOK_S = 1.0, 0.1
def work():
    print("begun", os.getpid(), flush=True)
    {}
try:
    with base.exit_on_mistake():
        guarded_process.run_guarded(work, lambda what: f"x.h5: h5py {{what}}. HINT: copy it again")
except typer.Exit as end:
    sys.exit(end.exit_code)
"""
BACKTRACKS = 're.match(r"(a+)+$", "a" * 60 + "b")'  # endless, and holds the GIL
LOOP = "    until = time.time() + 2\n    while time.time() < until:"


def start(work):
    words = [sys.executable, "-c", FRAME.format(work)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, text=True, **pipes)


@pytest.mark.parametrize(
    ("work", "code", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", 2, "x.h5: h5py has crashed (SIGSEGV). HINT"),
        ("os.abort()", 2, "h5py has crashed (SIGABRT)"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            2,
            "was killed. HINT: check whether memory was exhausted",
        ),
        (BACKTRACKS, 2, "h5py has used 1 s of CPU time and has not returned. HINT"),
        ("raise ValueError('x.h5: is no file')", 2, "paceline: x.h5: is no file"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("raise KeyboardInterrupt", 130, "paceline: interrupted"),
        ("raise typer.Exit(7)", 7, ""),
        ("time.sleep(1.5)", 0, ""),  # as with slow storage
        (f"def f(n): return n if n < 2 else f(n - 1) + f(n - 2)\n{LOOP} f(20)", 0, ""),
        (f"file = open('/dev/zero', 'rb')\n{LOOP} sum(file.read(1 << 22))", 0, ""),
    ],
)
def test_exit_code_and_error_of_child_are_reported(work, code, said):
    done = start(work)
    out, err = done.communicate(timeout=30)
    assert (done.returncode, out.split()[0]) == (code, "begun"), err
    assert said in err
    assert bool(err) == bool(said)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signal_ends_command_and_child(number):
    command = start("time.sleep(60)")
    child = int(command.stdout.readline().split()[1])
    command.send_signal(number)
    command.communicate(timeout=10)
    assert command.returncode == (130 if number == signal.SIGINT else -number)
    end = time.monotonic() + 5
    while os.path.exists(f"/proc/{child}"):
        assert time.monotonic() < end
        time.sleep(0.02)
