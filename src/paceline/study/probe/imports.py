"""What ``import torch`` takes in a fresh interpreter: seconds, and calls to the file system.

On a shared file system these calls are what a start costs. strace counts them all; without it an
audit hook counts opens and listings only, which are about a tenth."""

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ...cost.machine import SECONDS, Figure

CODE = "import time; t = time.perf_counter(); import torch; print(time.perf_counter() - t)"
COUNTED = f"""
import sys
calls = 0
def hook(event, args):
    global calls
    calls += event in ("open", "os.listdir", "os.scandir")
sys.addaudithook(hook)
{CODE}
print(calls)
"""
STRACE, HOOK = "strace", "audit hook: opens and listings only"


@dataclass(frozen=True)
class Import:
    """first_s: of the first time alone, when what it reads may not be in memory yet."""

    seconds: Figure
    first_s: float
    calls: int
    counted_by: str


def import_torch(times: int = 3, interpreter: str = sys.executable, count: bool = True) -> Import:
    """Measured so many times; count: by strace, where it is, in an interpreter of its own."""
    found = [float(_run([interpreter, "-P", "-c", COUNTED]).split()[0]) for _ in range(times - 1)]
    last, hooked = _run([interpreter, "-P", "-c", COUNTED]).split()[:2]
    found.append(float(last))
    calls = _traced(interpreter) if count else None
    by = HOOK if calls is None else STRACE
    return Import(Figure.of(found, SECONDS), found[0], int(hooked) if calls is None else calls, by)


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
