"""Helpers that start ranks: a script, run by a launcher in a temporary folder."""

import fcntl
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import warm_start

BIN = Path(sys.executable).parent
PACELINE = str(BIN / "paceline")


def write(folder: Path, text: str, name: str = "script.py") -> Path:
    """Write a user script, dedented, and return its path."""
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def command(script: Path, *args: object, ranks: int = 2, launcher: str = "paceline") -> list[str]:
    """Return the command that starts a script on ranks.

    ``launcher`` is "paceline", optionally followed by options of run, "torchrun", or "python".
    """
    name, *options = launcher.split()
    start = {
        "paceline": [PACELINE, "run", "-n", str(ranks), *options],
        "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(ranks)],
        "python": [sys.executable],
    }[name]
    return [*start, str(script), *map(str, args)]


def environment(**more: str) -> dict[str, str]:
    """Return environment variables without those of an outer launcher or terminal."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NO_COLOR")
    kept = {n: v for n, v in os.environ.items() if n not in names and not n.startswith("PACELINE")}
    return {"OMP_NUM_THREADS": "1", **kept, **more}


def run_command(
    words: Sequence[object], cwd: Path, env: dict[str, str], timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a command without input and wait for it; use ``warm_start`` if the command allows it."""
    words = [str(word) for word in words]
    if warm_start.fits(words, env):
        return warm_start.run(words, cwd=cwd, env=env, timeout=timeout)
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
    )


def start(
    words: Sequence[object],
    *,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
) -> Any:
    """Start a command and return its Popen; use ``warm_start`` if the command allows it."""
    words = [str(word) for word in words]
    variables = environment() if env is None else env
    if warm_start.fits(words, variables):
        return warm_start.Process(words, cwd=cwd, env=variables, stdout=stdout, stderr=stderr)
    return subprocess.Popen(words, cwd=cwd, env=variables, stdout=stdout, stderr=stderr, text=True)


def run(
    script: Path,
    *args: object,
    ranks: int = 2,
    launcher: str = "paceline",
    timeout: float = 120,
    check: bool = True,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Run a script on ranks and wait; with ``check``, a failure shows the whole output."""
    words = command(script, *args, ranks=ranks, launcher=launcher)
    result = run_command(words, script.parent, environment(**env), timeout)
    if check and result.returncode:
        raise AssertionError(f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}")
    return result


def untagged(text: str) -> set[str]:
    """Return the distinct lines of a job's output, without the rank prefixes."""
    return {re.sub(r"^\[[\d,-]+\] ", "", line) for line in text.splitlines()}


def alive(marker: str) -> list[str]:
    """Return command lines of running processes that contain ``marker``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if marker in line and state != "Z":
                found.append(line)
    return found


def family(pid: int) -> list[int]:
    """Return a process and all its descendants; children come after their parents."""
    found = [pid]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == pid:
                found += family(int(entry.name))
    return found


def wait_until(condition, seconds: float = 20.0) -> None:
    """Wait until a condition is true; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("the condition did not come true in time")
        time.sleep(0.02)


def in_memory(folder: Path) -> set[str]:
    """Return what jobs of a test have left in /dev/shm: this user's job folders, not locked by a
    running job, whose script or record is in ``folder``. Other tests may run at the same time.
    """
    found = set()
    for path in Path("/dev/shm").glob(f"paceline-job-{os.geteuid()}-*"):
        try:
            if not any(str(folder) in file.read_text() for file in path.glob("*.json")):
                continue
            with open(path / "lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        except OSError:
            if not path.exists():
                continue
        found.add(path.name)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_by_hand(script: Path, record: Path, prefixes: list[list[str]]) -> None:
    """Start one recorded rank per command prefix without a launcher, as a cluster's tools do."""
    port, size = free_port(), len(prefixes)
    started = []
    for rank, prefix in enumerate(prefixes):
        variables = environment(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        command = [*prefix, PACELINE, "record", str(record), str(script)]
        started.append(subprocess.Popen(command, env=variables))
    try:
        assert [process.wait(timeout=120) for process in started] == [0] * size
    finally:
        for process in started:
            process.kill()
