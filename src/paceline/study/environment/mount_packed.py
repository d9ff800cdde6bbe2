"""Temporary folder on which a packed environment is mounted, or into which it is unpacked.

The folder is removed afterwards, also if the process is interrupted.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...security.processes import find_program, program_command
from ...security.removal import TemporaryFolder
from ..probe.measure.host_facts import free_space

COMMAND_TIMEOUT_S = 30.0  # timeout of mount and unmount commands
BUSY_TIMEOUT_S = 3.0  # how long a busy mount is retried before it is unmounted lazily
FUSE = "/dev/fuse"


class CannotMountError(Exception):
    """Raised if the packed file can't be mounted or unpacked on this host, with the reason."""


@dataclass(frozen=True)
class Mounted:
    """A mounted or unpacked environment.

    Attributes:
        folder: The temporary folder.
        how: Description for the user, with the name of the tool.
        seconds: Time to mount or unpack.
    """

    folder: Path
    how: str
    seconds: float


@contextmanager
def mount_file(file: Path) -> Iterator[Mounted]:
    """Mount a squashfs file for the duration of the context.

    Raises:
        CannotMountError: The file can't be mounted on this host.
    """
    with _folder() as folder:
        how = ""
        try:
            start = time.perf_counter()
            how = _mount(file, folder)
            yield Mounted(folder, how, time.perf_counter() - start)
        finally:
            with _ignore_signals():
                _unmount(folder)


@contextmanager
def unpack_file(file: Path, needed: int) -> Iterator[Mounted]:
    """Unpack a squashfs or tar file into a temporary folder for the duration of the context.

    Args:
        needed: Required free space in bytes.

    Raises:
        CannotMountError: The tool is not installed, there is too little space, or it failed.
    """
    tool = "tar" if file.suffix == ".tar" else "unsquashfs"
    if find_program(tool) is None:
        raise CannotMountError(f"{tool} is not installed")
    with _folder() as folder:
        free = free_space(folder)
        if free is not None and free < needed:
            where = f"{folder.parent} has {free / 1e6:,.0f} MB free"
            raise CannotMountError(
                f"{where}, and {needed / 1e6:,.0f} MB are needed (set TMPDIR to another folder)"
            )
        words = ["tar", "-xf", str(file), "-C", str(folder)]
        if tool == "unsquashfs":
            words = ["unsquashfs", "-f", "-n", "-q", "-d", str(folder), str(file)]
        start = time.perf_counter()
        failed = _run_command(words, None)
        if failed:
            raise CannotMountError(failed)
        yield Mounted(folder, f"unpacked by {tool}", time.perf_counter() - start)


def _mount(file: Path, folder: Path) -> str:
    why = []
    if find_program("squashfuse") is None:
        why.append("squashfuse is not installed")
    else:
        failed = _open_error(FUSE) or _run_command(
            ["squashfuse", str(file), str(folder)], COMMAND_TIMEOUT_S
        )
        if not failed and os.path.ismount(folder):
            return "mounted by squashfuse"
        why.append(failed or "squashfuse mounted nothing")
    if os.geteuid() != 0:
        why.append("mount needs root")
    else:
        words = ["mount", "-t", "squashfs", "-o", "loop,ro", str(file), str(folder)]
        failed = _run_command(words, COMMAND_TIMEOUT_S)
        if not failed:
            return "mounted by the kernel"
        why.append(failed)
    raise CannotMountError("; ".join(why))


def _open_error(device: str) -> str:
    try:
        os.close(os.open(device, os.O_RDWR))
    except OSError as error:
        return f"{device} can't be opened: {error.strerror}"
    return ""


def _run_command(words: list[str], seconds: float | None) -> str:
    """Run a command; return the reason of a failure in one line, or ""."""
    try:
        done = subprocess.run(
            program_command(*words),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=seconds,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{words[0]}: {error}"
    if done.returncode == 0:
        return ""
    said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["no output"]
    return f"{words[0]} ended with exit code {done.returncode}: {said[-1].strip()}"


def _unmount(folder: Path) -> None:
    """Unmount with any of the installed tools; a mount that stays busy is detached lazily."""
    tools = [["fusermount3", "-u"], ["fusermount", "-u"], ["umount"]]
    known = [tool for tool in tools if find_program(tool[0])]
    end = time.monotonic() + BUSY_TIMEOUT_S
    while os.path.ismount(folder):
        lazy = time.monotonic() > end
        for tool in known:
            late = [] if not lazy else ["-l"] if tool[0] == "umount" else ["-z"]
            if not _run_command([*tool, *late, str(folder)], COMMAND_TIMEOUT_S):
                break
        else:
            if lazy:
                sys.stderr.write(f"paceline: {folder} is still mounted. HINT: umount {folder}\n")
                return
        if os.path.ismount(folder):
            time.sleep(0.1)


@contextmanager
def _folder() -> Iterator[Path]:
    folder = TemporaryFolder("paceline-pack-")
    try:
        yield folder.path
    finally:
        with _ignore_signals():
            folder.remove()  # what is mounted on it stays as it is


@contextmanager
def _ignore_signals() -> Iterator[None]:
    """Ignore signals, so that a second Ctrl-C does not interrupt the cleanup."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
