"""Faults of the machine: other programs, cores, and what slows a rank down from outside."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from injectors import Injector

BUSY = """
import sys, time
share = min(float(sys.argv[1]), 1)
while True:
    end = time.perf_counter() + 0.02 * share
    while time.perf_counter() < end:
        pass
    time.sleep(0.02 * (1 - share))
"""


@contextlib.contextmanager
def two_programs(amount: float, _: Path) -> Iterator[None]:
    command = [sys.executable, "-c", BUSY, f"{amount}"]
    programs = [subprocess.Popen(command) for _ in range(2)]
    try:
        yield
    finally:
        for one in programs:
            one.kill()
            one.wait()


INJECTORS = [
    Injector("noisy-machine", "processor", steady=False, start=0.3, most=1.0, around=two_programs),
    Injector("affinity", "taskset", steady=False, fixed=True, command=("taskset", "-c", "0")),
    Injector(
        "thread",
        "numpy",
        steady=False,
        start=0.2,
        most=1.0,
        module="""
import os
import threading
import time

import numpy as np

DUTY = $amount


def statistics():
    values = np.random.default_rng(0).random(20_000)
    while True:
        start = time.perf_counter()
        np.sort(values)
        used = time.perf_counter() - start
        time.sleep(used * (1 - DUTY) / DUTY)


threading.Thread(target=statistics, name="statistics", daemon=True).start()
""",
    ),
    Injector(
        "throttled",
        "signals",
        steady=False,
        start=0.2,
        most=0.8,
        module="""
import os
import subprocess
import sys

CODE = '''
import os, signal, sys, time
rank, share = int(sys.argv[1]), float(sys.argv[2])
try:
    while os.getppid() == rank:
        os.kill(rank, signal.SIGSTOP)
        time.sleep(0.02 * share)
        os.kill(rank, signal.SIGCONT)
        time.sleep(0.02 * (1 - share))
except ProcessLookupError:
    pass
'''
if os.environ.get("RANK") == "1":
    subprocess.Popen([sys.executable, "-S", "-c", CODE, str(os.getpid()), "$amount"])
""",
    ),
]
