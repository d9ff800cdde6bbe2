"""Run commands within a time budget, and read the end of their output."""

import contextlib
import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...security.files import open_regular
from ...security.text import printable
from .launcher_server import LauncherServer

MINUTE_S = 60.0
MAX_LOG_BYTES = 1 << 20  # read from the end of a run's output
LAST_LINES = 6  # of the output of a failed run, shown in the error
RANK_FAILED = re.compile(r"^paceline: rank \d+ failed: ")
POLL_S = 0.05  # while several runs last
# Signals that end runs, each with the time in s that the runs have to end their ranks.
END_SIGNALS = ((signal.SIGINT, 6.0), (signal.SIGTERM, 6.0), (signal.SIGKILL, 10.0))


@dataclass(frozen=True)
class Deadline:
    """A point in time at which a command's runs, or a part of them, end.

    Attributes:
        at_s: On the clock of ``time.monotonic``.
    """

    at_s: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """Return the deadline that many seconds from now."""
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds left; 0 after the deadline."""
        return max(self.at_s - time.monotonic(), 0.0)

    def part(self, share: float) -> "Deadline":
        """Return the deadline after this share of the time that is left."""
        return Deadline.after(share * self.left_s)


class Process(Protocol):
    """What is used of a process that was started."""

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...


def run_processes(
    commands: Sequence[tuple[list[str], Path]],
    limit_s: float | None = None,
    server: LauncherServer | None = None,
) -> list[tuple[int | None, float]]:
    """Run commands at the same time, each with its output in a file.

    Each has its own process group, so that Ctrl-C reaches it once: from here.

    Args:
        commands: Words and output file of each.
        limit_s: Maximum duration.
        server: Starts the commands, if there is one.

    Returns:
        For each command its exit code (None after ``limit_s``), and how long it took in s.
    """
    started: list[Process] = []
    failed: list[Exception] = []

    def start() -> None:
        try:
            for words, log in commands:
                with log.open("w") as file:
                    if server is not None:
                        started.append(server.start_command(words, str(log)))
                        continue
                    options: Any = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
                    started.append(subprocess.Popen(words, process_group=0, **options))
        except Exception as error:  # raised below, in the thread that asked
            failed.append(error)

    # Signals interrupt the main thread only: a process that has started is never lost.
    thread = threading.Thread(target=start)
    begun = time.monotonic()
    try:
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return _wait(started, begun, limit_s)
    finally:
        if thread.ident is not None:
            thread.join()
        _end(started)


def _wait(
    processes: Sequence[Process], begun: float, limit_s: float | None
) -> list[tuple[int | None, float]]:
    """Wait until all processes have ended, or the time is over."""
    ended: dict[int, tuple[int | None, float]] = {}
    waiting = dict(enumerate(processes))
    limited = limit_s is not None and limit_s != math.inf
    while waiting:
        left_s = begun + (limit_s or 0.0) - time.monotonic() if limited else None
        if left_s is not None and left_s <= 0:
            break
        first = next(iter(waiting.values()))
        if len(waiting) > 1:  # whichever ends first
            left_s = POLL_S if left_s is None else min(POLL_S, left_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            first.wait(left_s)
        for at, process in list(waiting.items()):
            if process.poll() is not None:
                ended[at] = process.returncode, time.monotonic() - begun
                del waiting[at]
    over = None, time.monotonic() - begun
    return [ended.get(at, over) for at in range(len(processes))]


def _end(processes: Sequence[Process]) -> None:
    """End the runs that still run, all together; a further Ctrl-C does so sooner."""
    for kind, timeout_s in END_SIGNALS:
        running = [process for process in processes if process.poll() is None]
        if not running:
            return
        for process in running:
            process.send_signal(kind)
        limit = time.monotonic() + timeout_s
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            for process in running:
                process.wait(max(limit - time.monotonic(), 0.0))


def last_lines(log: Path, count: int = LAST_LINES) -> list[str]:
    """Return the last lines that a run has printed."""
    with open(open_regular(log), "rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - MAX_LOG_BYTES, 0))
        text = file.read(MAX_LOG_BYTES).decode(errors="replace")
    printed = [printable(line) for line in text.splitlines()]
    lines = [x for x in printed if x.strip() and not x.startswith("paceline: the record is in")]
    return lines[-count:] or ["(the script printed nothing)"]


def error_line(last: list[str]) -> str:
    """Return the last line that names an exception, less the launcher's words before it, or ""."""
    named = (x for x in reversed(last) if re.search(r"\b\w*(Error|Exception)\b", x))
    return RANK_FAILED.sub("", next(named, "").strip())


def launcher_line(last: list[str]) -> str:
    """Return the launcher's last line, such as why it started no rank, or ""."""
    return next((x.partition(": ")[2] for x in reversed(last) if x.startswith("paceline: ")), "")
