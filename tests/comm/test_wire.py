"""The steps of collectives between hosts, with threads that are connected by sockets as hosts."""

import os
import shutil
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import played
import pytest
import ranks

import paceline
from paceline.comm.hosts import c_wire
from paceline.comm.hosts.c_wire import encode_program
from paceline.comm.hosts.schedules import ALL_REDUCE, Step

WIRE = Path(paceline.__file__).parent / "comm" / "hosts" / "wire.c"


@pytest.mark.parametrize("hosts", [2, 3, 4, 7])
@pytest.mark.parametrize("name", ALL_REDUCE)
def test_every_all_reduce_algorithm_is_bitwise_equal_on_all_hosts(name, hosts):
    for count in played.SIZES:
        each, found = played.reduced(name, hosts, count)
        np.testing.assert_allclose(found[0], np.sum(each, 0), rtol=1e-5, atol=1e-5)
        for one in found[1:]:
            assert one.tobytes() == found[0].tobytes(), "other bits"
        again = played.reduced(name, hosts, count)[1]
        assert again[0].tobytes() == found[0].tobytes(), "other bits in another run"


def test_reduce_operations_and_dtypes():
    each, found = played.reduced("direct", 3, 999, "max", "float64")
    assert (found[2] == np.max(each, 0)).all()
    each, found = played.reduced("ring", 3, 999, "product", "float64")
    np.testing.assert_allclose(found[1], np.prod(each, 0), rtol=1e-12)
    # A mean is only summed here: each host has already divided its vector.
    each, found = played.reduced("halving", 4, 999, "mean", "float32")
    np.testing.assert_allclose(found[0], np.sum(each, 0), rtol=1e-5, atol=1e-5)


def test_broadcast_from_each_root():
    for root in range(5):
        for one in played.spread(5, 10_000, root):
            assert (one == root).all()


def both_ways(nbytes, to):
    return encode_program([Step(((to, 0, nbytes),), ((to, 0, nbytes),))])


def fails(what, timeout=played.TIMEOUT):
    """Run a step on two hosts, call ``what`` on the second one, and return the errors of both."""
    together = played.Together(2)

    def each(me, wire):
        data = np.zeros(1000, np.float32)
        said = played.call("all-reduce", nbytes=data.nbytes)
        if me == 1:
            said = what(together) or said
        wire.run(both_ways(data.nbytes, 1 - me), data.ctypes.data, said, timeout)

    together.do(each)
    together.close()
    return together.errors


def test_mismatched_collective_is_reported_with_peer_call():
    theirs = played.call("broadcast", nbytes=4000)
    errors = fails(lambda _: theirs)
    assert (errors[0].reason, errors[0].host, errors[0].peer_call) == (c_wire.DIFFERS, 1, theirs)
    assert errors[1].peer_call == played.call("all-reduce", nbytes=4000)


def test_closed_connection_is_detected_immediately():
    start = time.monotonic()
    errors = fails(lambda together: [one.close() for one in together.kept[1::2]] and None)
    assert (errors[0].reason, errors[0].host) == (c_wire.CLOSED, 1)
    assert time.monotonic() - start < played.TIMEOUT / 2


def test_silent_peer_times_out():
    gone_on = threading.Event()
    together = played.Together(2)

    def each(me, wire):
        data = np.zeros(10, np.float32)
        said = played.call("all-reduce", nbytes=data.nbytes)
        if me == 0:
            try:
                wire.run(both_ways(data.nbytes, 1), data.ctypes.data, said, 0.3)
            finally:
                gone_on.set()
        gone_on.wait(played.TIMEOUT)

    together.do(each)
    together.close()
    assert (together.errors[0].reason, together.errors[0].host) == (c_wire.SILENT, 1)


@pytest.mark.parametrize("timeout", [timedelta.max.total_seconds(), float("inf"), 0.0])
def test_late_peer_within_unlimited_timeout(timeout):
    assert fails(lambda _: time.sleep(0.2), timeout) == {}  # the other host has looked at the time


def test_waiting_host_detects_broken_flag():
    def breaks(together):
        time.sleep(0.2)  # until the other host waits
        together.broken[0] = 1
        raise c_wire.StepError(c_wire.BROKEN, 0)

    start = time.monotonic()
    assert fails(breaks)[0].reason == c_wire.BROKEN
    assert time.monotonic() - start < played.TIMEOUT / 2


@pytest.mark.long
def test_interpreter_passes_sanitizers(tmp_path):
    compiler = shutil.which("gcc")
    assert compiler, "HINT: make test-packages"
    built = tmp_path / "wire.so"
    flags = ["-std=c11", "-O1", "-g", "-DPLAIN", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run([compiler, *flags, "-o", str(built), str(WIRE)], check=True)
    found = [
        subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True)
        for name in ("libasan.so", "libubsan.so")
    ]
    env = ranks.environment(
        LD_PRELOAD=":".join(one.stdout.strip() for one in found),
        ASAN_OPTIONS="detect_leaks=0",  # the Python interpreter leaks
        PYTHONPATH=os.pathsep.join(sys.path),
    )
    command = [sys.executable, str(Path(played.__file__)), str(built)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "clean\n"
