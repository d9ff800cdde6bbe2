"""What ``import torch`` takes in a fresh interpreter: seconds, how many of them it computed, and
calls to the file system.

On a shared file system these calls are what a start costs. strace counts them all; without it an
audit hook counts opens and listings only, which are about a tenth."""

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ....cost.machine.machine_file import SECONDS, Figure

CODE = """
import resource, sys, time
calls = 0
def hook(event, args):
    global calls
    calls += event in ("open", "os.listdir", "os.scandir")
def busy():
    used = resource.getrusage(resource.RUSAGE_SELF)
    try:
        with open("/proc/self/schedstat") as file:
            queued = int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        queued = 0.0
    return used.ru_utime + used.ru_stime + queued
sys.addaudithook(hook)
before, start = busy(), time.perf_counter()
import torch
took = time.perf_counter() - start
print("paceline", took, min(took, busy() - before), calls, torch.__file__)
"""
STRACE, HOOK = "strace", "audit hook: opens and listings only"


@dataclass(frozen=True)
class Timed:
    """One import. busy_s: of its seconds those of a core, its own or another's that it waited for:
    the rest are waits for files. opened: opens and listings. file: where torch is."""

    seconds: float
    busy_s: float
    opened: int
    file: str


@dataclass(frozen=True)
class Import:
    """first_s, first_busy_s: of the first time alone, when what it reads may not be in memory
    yet. file: where torch is."""

    seconds: Figure
    busy: Figure
    first_s: float
    first_busy_s: float
    calls: int
    counted_by: str
    file: str


def import_torch(times: int = 3, interpreter: str = sys.executable, count: bool = True) -> Import:
    """Measured so many times; count: by strace, where it is, in an interpreter of its own."""
    found = [timed(interpreter) for _ in range(times)]
    calls = _traced(interpreter) if count else None
    return Import(
        Figure.of([one.seconds for one in found], SECONDS),
        Figure.of([one.busy_s for one in found], SECONDS),
        found[0].seconds,
        found[0].busy_s,
        found[-1].opened if calls is None else calls,
        HOOK if calls is None else STRACE,
        found[0].file,
    )


def timed(interpreter: str) -> Timed:
    """Once, in an interpreter of its own."""
    said = _run([interpreter, "-P", "-c", CODE])
    # Packages may print when they are imported.
    line = next(one for one in said.splitlines() if one.startswith("paceline "))
    _, seconds, busy, opened, file = line.split(" ", 4)
    return Timed(float(seconds), float(busy), int(opened), file)


def _traced(interpreter: str) -> int | None:
    """Calls with a file's name, and fstat and getdents, of the interpreter's start and the
    import; None without a strace that may trace."""
    strace = shutil.which("strace")
    if strace is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table"
        words = [strace, "-f", "-c", "-o", str(table), "-e", "trace=file,fstat,getdents64"]
        try:
            _run([*words, interpreter, "-P", "-c", "import torch"])
            said = table.read_text()
        except (ValueError, OSError):  # many containers forbid it
            return None
    total = re.search(r"^\s*100\.00\s+\S+\s+\S+\s+(\d+).*total$", said, re.MULTILINE)
    return int(total[1]) if total else None


def _run(words: list[str]) -> str:
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise ValueError("import torch took more than 120 s. HINT: is its folder slow?") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["without a word"])[-1]
        raise ValueError(f"{' '.join(words[:2])} ... ended with {done.returncode}: {last}")
    return done.stdout
