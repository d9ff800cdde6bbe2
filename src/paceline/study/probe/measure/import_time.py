"""Cost of ``import torch`` in a fresh interpreter: seconds, CPU seconds and file system calls.

On a shared file system these calls dominate the startup time. strace counts all of them; without
strace an audit hook counts only opens and directory listings, which are about a tenth.
"""

import re
import subprocess
from dataclasses import dataclass

from ....cost.machine.machine_file import SECONDS, Figure
from ....security.processes import find_program, python_command
from ....security.removal import TemporaryFolder

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
    """Measurements of one import.

    Attributes:
        seconds: Wall-clock time of the import.
        busy_s: Seconds of it in which the process computed or waited for a core; in the rest it
            waited for files.
        opened: Number of opens and directory listings.
        file: Path of the imported torch package.
    """

    seconds: float
    busy_s: float
    opened: int
    file: str


@dataclass(frozen=True)
class Import:
    """Measurements of several imports.

    Attributes:
        seconds: Wall-clock time of all imports.
        busy: Seconds of these in which the process computed or waited for a core.
        first_s: Wall-clock time of the first import, whose files may not be in the page cache yet.
        first_busy_s: The same part of it as ``busy``.
        calls: Number of file system calls.
        counted_by: How they were counted.
        file: Path of the imported torch package.
    """

    seconds: Figure
    busy: Figure
    first_s: float
    first_busy_s: float
    calls: int
    counted_by: str
    file: str


def import_torch(times: int = 3, interpreter: str | None = None, count: bool = True) -> Import:
    """Measure ``import torch`` several times.

    Args:
        times: Number of imports, each in a new process.
        interpreter: Path of the Python interpreter; None: that of this process.
        count: Count the calls by strace, if it is installed, in one more process.

    Raises:
        ValueError: The import failed or took more than 120 s.
    """
    found = [timed(interpreter) for _ in range(times)]
    calls = _traced(interpreter) if count else None
    return Import(
        Figure.of([run.seconds for run in found], SECONDS),
        Figure.of([run.busy_s for run in found], SECONDS),
        found[0].seconds,
        found[0].busy_s,
        found[-1].opened if calls is None else calls,
        HOOK if calls is None else STRACE,
        found[0].file,
    )


def timed(interpreter: str | None = None) -> Timed:
    """Measure one import in a new process."""
    output = _run(python_command("-c", CODE, interpreter=interpreter))
    # Packages may print when they are imported.
    line = next(text for text in output.splitlines() if text.startswith("paceline "))
    _, seconds, busy, opened, file = line.split(" ", 4)
    return Timed(float(seconds), float(busy), int(opened), file)


def _traced(interpreter: str | None) -> int | None:
    """Return the number of file system calls of the interpreter's start and the import.

    These are calls with a file name, fstat and getdents.
    None if strace is missing or not allowed.
    """
    strace = find_program("strace")
    if strace is None:
        return None
    with TemporaryFolder() as folder:
        table = folder / "table"
        words = [strace, "-f", "-c", "-o", str(table), "-e", "trace=file,fstat,getdents64"]
        try:
            _run([*words, *python_command("-c", "import torch", interpreter=interpreter)])
            output = table.read_text()
        except (ValueError, OSError):  # many containers forbid tracing
            return None
    total = re.search(r"^\s*100\.00\s+\S+\s+\S+\s+(\d+).*total$", output, re.MULTILINE)
    return int(total[1]) if total else None


def _run(words: list[str]) -> str:
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            "import torch took more than 120 s. HINT: check the file system of its folder"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(
            f"{' '.join(words[:2])} ... ended with exit code {done.returncode}: {last}"
        )
    return done.stdout
