"""Faults of the machine, kept out (README.md)."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from injectors import Injector

COPIES = """
import sys, time
import numpy as np
share = min(float(sys.argv[1]), 1)
a, b = np.ones(1 << 23), np.empty(1 << 23)
while True:
    start = time.perf_counter()
    b[:] = a
    time.sleep((time.perf_counter() - start) * (1 - share) / share)
"""
CPU = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 20_000


@contextlib.contextmanager
def memory_traffic(amount: float, _: Path) -> Iterator[None]:
    command = [sys.executable, "-c", COPIES, f"{amount}"]
    programs = [subprocess.Popen(command) for _ in range(2)]
    try:
        yield
    finally:
        for one in programs:
            one.kill()
            one.wait()


@contextlib.contextmanager
def quota(amount: float, folder: Path) -> Iterator[None]:
    """Limit the processes that join the group to a part of a core."""
    group = CPU / f"scorecard-{os.getpid()}"
    group.mkdir(exist_ok=True)
    try:
        (group / "cpu.cfs_period_us").write_text(f"{PERIOD_US}")
        (group / "cpu.cfs_quota_us").write_text(f"{max(1000, round(PERIOD_US * (1 - amount)))}")
        (folder / "group").write_text(str(group / "cgroup.procs"))
        yield
    finally:
        (folder / "group").unlink(missing_ok=True)
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (CPU / "cgroup.procs").write_text(pid)
        group.rmdir()


INJECTORS = [
    Injector("noisy-machine", "memory", steady=False, start=0.3, most=1.0, around=memory_traffic),
    Injector(
        "affinity",
        "start",
        steady=False,
        fixed=True,
        points={
            "top": """
import os as _os
""",
            "start": """
_os.sched_setaffinity(0, {0})
""",
        },
    ),
    Injector(
        "thread",
        "python",
        steady=False,
        start=0.2,
        most=1.0,
        module="""
import threading
import time


class Progress(threading.Thread):
    # Follows the log of the run, and estimates the time left.
    def run(self):
        while True:
            end = time.monotonic() + 0.03 * $amount
            lines = 0
            while time.monotonic() < end:
                lines += sum(len(word) for word in "epoch step loss".split())
            time.sleep(0.03 * (1 - $amount) + 1e-4)


Progress(daemon=True).start()
""",
    ),
    Injector(
        "throttled",
        "cgroup",
        steady=False,
        start=0.2,
        most=0.9,
        around=quota,
        module="""
import os

if os.environ.get("RANK") == "1" and os.path.exists("$folder/group"):
    with open("$folder/group") as file:
        group = file.read()
    with open(group, "w") as file:
        file.write(str(os.getpid()))
""",
    ),
]
