"""Pack an environment into one file: a squashfs image to mount, or a tar archive to unpack.

The file is written under a temporary name in the same folder and renamed when it is complete.
"""

import errno
import os
import re
import secrets
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ...security.processes import find_program, program_command
from ..probe.measure.host_facts import free_space
from .find_environment import Environment

SQUASHFS, TAR = (".squashfs", ".sqsh"), (".tar",)
# The first compression that mksquashfs supports is used. Level 3 of zstd compresses several times
# faster than the default level, and decompresses equally fast.
COMPRESSIONS = {"zstd": ["-Xcompression-level", "3"], "lz4": [], "gzip": []}
LOOK_S = 0.2
Step = Callable[[float], None]  # called with the completed fraction


def choose_format(file: Path | None) -> Path:
    """Return the absolute path of the file to write; None chooses a name in the working directory.

    Raises:
        ValueError: The suffix is unknown, or mksquashfs is needed and not installed.
    """
    tool = find_program("mksquashfs")
    file = file or Path("env.squashfs" if tool else "env.tar")
    if file.suffix not in (*SQUASHFS, *TAR):
        raise ValueError(
            f"--packed FILE must end in .squashfs, .sqsh or .tar; this is {str(file)!r}. HINT: "
            "env.squashfs, which is mounted, or env.tar, which is unpacked"
        )
    if file.suffix in SQUASHFS and tool is None:
        raise ValueError(
            f"--packed {file}: mksquashfs is not installed. HINT: apt-get install squashfs-tools, "
            f"module avail squashfs, or --packed {file.with_suffix('.tar')}"
        )
    return file.absolute()


def ready(environment: Environment, file: Path) -> None:
    """Check that the file can be written.

    Raises:
        ValueError: The file exists, its folder is not usable, or the space does not suffice.
    """
    folder = file.parent
    if os.path.lexists(file):
        raise ValueError(
            f"--packed {file}: the file exists, and is never overwritten. HINT: remove it, or "
            "choose another name"
        )
    if not folder.is_dir():
        raise ValueError(f"--packed {file}: the folder does not exist. HINT: mkdir -p {folder}")
    if folder.resolve().is_relative_to(environment.prefix.resolve()):
        raise ValueError(
            f"--packed {file} is inside the environment to pack. HINT: choose another folder"
        )
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _refused(file, error) from None
    needed = environment.bytes + 1024 * environment.files * (file.suffix in TAR)
    free = free_space(folder)
    if free is not None and free < needed:
        raise ValueError(
            f"--packed {file}: {folder} has {free / 1e6:,.0f} MB free, and the environment "
            f"has {needed / 1e6:,.0f} MB. HINT: make room, or choose another folder (--packed FILE)"
        )


def pack(environment: Environment, file: Path, step: Step) -> float:
    """Write the file; return the seconds that it took.

    Args:
        step: Called with the completed fraction.

    Raises:
        ValueError: The file can't be written, or was created by another process meanwhile.
    """
    # A random name, so that another user can't create a link there before the tool opens it.
    part = file.with_name(f".{file.name}.{secrets.token_hex(8)}.part")
    write = _squashfs if file.suffix in SQUASHFS else _tar
    start = time.perf_counter()
    try:
        write(environment, part, step)
        with part.open("rb") as written:
            os.fsync(written.fileno())
        took = time.perf_counter() - start
        if os.path.lexists(file):
            raise ValueError(
                f"--packed {file}: another process has created the file. HINT: choose another name"
            )
        part.replace(file)
    except OSError as error:
        raise _refused(file, error) from None
    finally:
        part.unlink(missing_ok=True)
    return took


def _refused(file: Path, error: OSError) -> ValueError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "make room, or " * full + "choose a folder that you can write to (--packed FILE)"
    why = error.strerror or error
    return ValueError(f"--packed {file} can't be written: {why}. HINT: {hint}")


def _squashfs(environment: Environment, part: Path, step: Step) -> None:
    offered = subprocess.run(program_command("mksquashfs", "-help"), capture_output=True, text=True)
    names = re.findall(r"^\s+(\w+)(?: \(default\))?$", offered.stdout + offered.stderr, re.M)
    kind = next((one for one in COMPRESSIONS if one in names), None)
    words = program_command("mksquashfs", str(environment.prefix), str(part))
    words += ["-noappend", "-no-recovery"]
    words += ["-no-xattrs", "-no-progress", "-quiet", "-mem", "1G"]
    words += ["-processors", str(len(os.sched_getaffinity(0)))]
    words += ["-comp", kind, *COMPRESSIONS[kind]] if kind else []
    # mksquashfs would set the files' times to it, and Python validates __pycache__ by these times.
    known = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=known
        )
        try:
            while process.poll() is None:
                step(_read_by(process.pid) / max(1, environment.bytes))
                try:
                    process.wait(LOOK_S)
                except subprocess.TimeoutExpired:
                    pass
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            said.seek(0)
            lines = [line for line in said.read().splitlines() if line.strip()] or ["no output"]
            code = process.returncode
            ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise OSError(None, f"mksquashfs {ended}: {'; '.join(lines[:2])}")


def _read_by(pid: int) -> int:
    """Return the number of bytes that a process has read; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/io") as file:
            return int(file.readline().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _tar(environment: Environment, part: Path, step: Step) -> None:
    done = 0
    # GNU format: a header is one block if the name is short, and times are whole seconds.
    with tarfile.open(part, "w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(environment.prefix.rglob("*")):
            archive.add(path, path.relative_to(environment.prefix), recursive=False)
            done += 1
            step(done / max(1, environment.files))


@contextmanager
def describe(what: str) -> Iterator[Step]:
    """Show the progress of a long operation on standard error.

    On a terminal the percentage is updated in place; otherwise only start and end are printed.
    """
    terminal, start, last = sys.stderr.isatty(), time.perf_counter(), -1

    def write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    def step(part: float) -> None:
        nonlocal last
        now = min(99, int(100 * part))
        if terminal and now > last:
            last = now
            write(f"\rpaceline: {what} ... {now:2} %")

    write(f"paceline: {what} ..." + "\n" * (not terminal))
    try:
        yield step
    except BaseException:
        write("\n" * terminal)
        raise
    took = f"{time.perf_counter() - start:.1f} s"
    write(f"\rpaceline: {what}: {took}  \n" if terminal else f"paceline: {what}: {took}\n")
