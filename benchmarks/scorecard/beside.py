"""Faults planted outside the script: programs that use its cores, a slow host, a slow link.

The hosts are Linux namespaces of this machine (tests/bed).
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[2] / "tests"
sys.path.insert(0, str(TESTS))
sys.path.insert(0, str(TESTS / "support"))

CPU = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 10_000
LINK = "200mbit"
BUSY = """
import sys, time
share = float(sys.argv[1])
while True:
    end = time.perf_counter() + 0.05 * share
    while time.perf_counter() < end:
        pass
    time.sleep(0.05 * (1 - share))
"""


def runner(outside: str, strength: float) -> contextlib.AbstractContextManager:
    """Return a context with the fault: a function that runs a command, and options of diagnose.

    The function takes the command's arguments and returns its CompletedProcess. The options select
    the hosts.
    """
    if outside in ("throttled", "narrow"):
        return _hosts(outside, strength)
    return _on_this_machine(outside, strength)


@contextlib.contextmanager
def _on_this_machine(outside: str, strength: float) -> Iterator[tuple]:
    hogs = []
    if outside == "busy":
        count = os.cpu_count() or 1
        share = min(strength, 0.95)
        hogs = [subprocess.Popen([sys.executable, "-c", BUSY, f"{share}"]) for _ in range(count)]
    try:
        yield here, ["-n", "2"]
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def here(words: list[str]) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, capture_output=True, text=True, env=environment)


@contextlib.contextmanager
def _hosts(outside: str, strength: float) -> Iterator[tuple]:
    from bed import Hosts, missing

    if needed := missing():
        sys.exit(f"the hosts need {', '.join(needed)}. HINT: make test-packages, and run as root")
    group = CPU / f"paceline-scorecard-{os.getpid()}"
    with contextlib.closing(Hosts(2)) as hosts:

        def run(words: list[str]) -> subprocess.CompletedProcess:
            return hosts.run("host0", *words, check=False, timeout=600)

        try:
            if outside == "narrow":
                shaped = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", LINK]
                hosts.run("host2", *shaped, "burst", "100kb", "latency", "50ms")
            else:
                group.mkdir()
                quota = round(PERIOD_US / (1 + strength))  # CPU time of one core per period
                (group / "cpu.cfs_period_us").write_text(f"{PERIOD_US}")
                (group / "cpu.cfs_quota_us").write_text(f"{quota}")
                for pid in _processes(hosts, "host2"):
                    (group / "cgroup.procs").write_text(pid)
            yield run, ["-H", "host1:1,host2:1"]
        finally:
            if group.exists():
                for pid in (group / "cgroup.procs").read_text().split():
                    (CPU / "cgroup.procs").write_text(pid)
                group.rmdir()


def _processes(hosts: object, name: str) -> list[str]:
    """Return the PIDs, on this machine, of a host's processes."""
    space = os.readlink(f"/proc/{hosts.first(name)}/ns/pid")
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "ns/pid") == space:
                found.append(entry.name)
    return found
