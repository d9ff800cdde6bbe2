"""Where a packed environment is used: a temporary folder that its file is mounted on or unpacked
into, and that is gone afterwards, however this ends."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..probe.measure.host_facts import free_space

PATIENCE_S = 30.0  # for mount
BUSY_S = 3.0  # so long something may still use what is to be unmounted
FUSE = "/dev/fuse"


class NoWayError(Exception):
    """It can't be used here, and why."""


@dataclass(frozen=True)
class Place:
    """how: in words, with the tool's name. seconds: that it took."""

    folder: Path
    how: str
    seconds: float


@contextmanager
def mounted(file: Path) -> Iterator[Place]:
    """A squashfs file, mounted. Raises NoWayError."""
    with _folder() as folder:
        how = ""
        try:
            start = time.perf_counter()
            how = _mount(file, folder)
            yield Place(folder, how, time.perf_counter() - start)
        finally:
            with _undisturbed():
                _unmount(folder)


@contextmanager
def unpacked(file: Path, needed: int) -> Iterator[Place]:
    """A file of either kind, in a local folder with so many bytes of room. Raises NoWayError."""
    tool = "tar" if file.suffix == ".tar" else "unsquashfs"
    if shutil.which(tool) is None:
        raise NoWayError(f"{tool} is not installed")
    with _folder() as folder:
        free = free_space(folder)
        if free is not None and free < needed:
            where = f"{folder.parent} has {free / 1e6:,.0f} MB free"
            raise NoWayError(f"{where} of {needed / 1e6:,.0f} MB: TMPDIR says another folder")
        words = ["tar", "-xf", str(file), "-C", str(folder)]
        if tool == "unsquashfs":
            words = ["unsquashfs", "-f", "-n", "-q", "-d", str(folder), str(file)]
        start = time.perf_counter()
        failed = _failure(words, None)
        if failed:
            raise NoWayError(failed)
        yield Place(folder, f"unpacked by {tool}", time.perf_counter() - start)


def _mount(file: Path, folder: Path) -> str:
    why = []
    if shutil.which("squashfuse") is None:
        why.append("squashfuse is not installed")
    else:
        failed = _opens(FUSE) or _failure(["squashfuse", str(file), str(folder)], PATIENCE_S)
        if not failed and os.path.ismount(folder):
            return "mounted by squashfuse"
        why.append(failed or "squashfuse mounted nothing")
    if os.geteuid() != 0:
        why.append("mount is for root only")
    else:
        words = ["mount", "-t", "squashfs", "-o", "loop,ro", str(file), str(folder)]
        failed = _failure(words, PATIENCE_S)
        if not failed:
            return "mounted by the kernel"
        why.append(failed)
    raise NoWayError("; ".join(why))


def _opens(device: str) -> str:
    try:
        os.close(os.open(device, os.O_RDWR))
    except OSError as error:
        return f"{device} can't be opened: {error.strerror}"
    return ""


def _failure(words: list[str], seconds: float | None) -> str:
    """Run it; why it failed, in a line."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=seconds
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{words[0]}: {error}"
    if done.returncode == 0:
        return ""
    said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["not a word"]
    return f"{words[0]} ended with {done.returncode}: {said[-1].strip()}"


def _unmount(folder: Path) -> None:
    """Whatever mounted it; a mount that stays in use is at least gone from its folder."""
    tools = [["fusermount3", "-u"], ["fusermount", "-u"], ["umount"]]
    known = [tool for tool in tools if shutil.which(tool[0])]
    end = time.monotonic() + BUSY_S
    while os.path.ismount(folder):
        lazy = time.monotonic() > end
        for tool in known:
            late = [] if not lazy else ["-l"] if tool[0] == "umount" else ["-z"]
            if not _failure([*tool, *late, str(folder)], PATIENCE_S):
                break
        else:
            if lazy:
                sys.stderr.write(f"paceline: {folder} is still mounted. HINT: umount {folder}\n")
                return
        if os.path.ismount(folder):
            time.sleep(0.1)


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="paceline-pack-"))
    try:
        yield folder
    finally:
        with _undisturbed():
            if not os.path.ismount(folder):
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C does not break off what cleans up."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
