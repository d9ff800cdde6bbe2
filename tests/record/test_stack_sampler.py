"""A process that stands still records it afterwards; a process that computes does not."""

import os
import signal
import subprocess
import sys
import time

import pytest
import ranks

from paceline.analyze.records.read_record import parse_record
from paceline.record.ring import stack_sampler
from paceline.record.ring.states import State

SCRIPT = """
    import ctypes, sys, time
    from pathlib import Path
    from paceline.record.ring.recorder import Recorder
    from paceline.record.ring.stack_sampler import StackSampler

    recorder = Recorder(0, 1, folder=Path(sys.argv[1]))
    sampler = StackSampler(recorder)
    time.sleep(0.4)  # it looks around, and finds that nothing is unusual
    began = time.monotonic()
    {does}
    print("for", time.monotonic() - began, flush=True)
    time.sleep(0.4)
"""
# Holds the GIL for more than a second, because the evaluation loop never gets control.
COMPUTES = "while time.monotonic() - began < 1.2: began += 0 * sum(range(30_000_000))"
SLEEPS = "ctypes.PyDLL(None).usleep(900_000)"
STOPPED = "print('now', flush=True); sys.stdin.readline()"


def seen(folder, does, meanwhile=lambda process: None):
    """Return the recorded standstills, [(start, end)] in seconds, and the process's output."""
    script = ranks.write(folder, SCRIPT.format(does=does))
    process = subprocess.Popen(
        [sys.executable, script, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ranks.environment(),
    )
    meanwhile(process)
    said, _ = process.communicate("\n", timeout=60)
    assert process.returncode == 0
    (path,) = folder.glob("*.ring")
    rows = parse_record(path.read_bytes()).events_in(State.STILL)
    assert all(rows["group"] == 0)
    return list(zip(rows["start"] / 1e9, rows["end"] / 1e9, strict=True)), said


def test_stopped_process_records_interval_from_sigstop_to_sigcont(tmp_path):
    at = []

    def stop(process):
        assert process.stdout.readline() == "now\n"
        for number, seconds in ((signal.SIGSTOP, 1.0), (signal.SIGCONT, 0.0)):
            at.append(time.monotonic())
            os.kill(process.pid, number)
            time.sleep(seconds)

    ((start, end),), _ = seen(tmp_path, STOPPED, stop)
    assert start == pytest.approx(at[0], abs=0.2)
    assert end == pytest.approx(at[1], abs=0.2)
    assert start >= at[0] - 0.05  # the start is never too early, not even on a busy machine


def test_computation_holding_the_gil_is_not_a_standstill(tmp_path):
    assert seen(tmp_path, COMPUTES)[0] == []


def test_native_call_sleeping_with_the_gil_is_a_standstill(tmp_path):
    ((start, end),), _ = seen(tmp_path, SLEEPS)
    assert end - start == pytest.approx(0.8, abs=0.2)


def test_packages_outside_of_the_environment_are_libraries(tmp_path):
    """As PyTorch of a cluster's module, or of a venv with the system's packages."""
    site = tmp_path / "module" / "site-packages"
    site.mkdir(parents=True)
    code = "from paceline.record.ring.stack_sampler import LIBRARY_PREFIXES as found; print(found)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{site}{os.sep}" in done.stdout


def test_functions_of_paceline_are_not_named_as_those_that_a_line_called():
    def through(*modules):
        """Return what ``_library`` names, called through functions of modules."""
        call, own = (lambda: stack_sampler._library(sys._getframe(), own)), sys._getframe()
        for module in reversed(modules):
            space = {"__name__": module, "inner": call}
            exec("def function():\n    return inner()", space)
            call = space["function"]
        # the innermost frame is this test's, so it is Paceline's for this call
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "__name__", "paceline.test")
            return call()

    assert through("paceline.record.hooks.keras_training") == ""
    assert through("json", "paceline.record.hooks.keras_training") == "json.function"
