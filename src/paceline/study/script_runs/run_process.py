"""Run a command, and read the end of its output."""

import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from ...security.files import open_regular
from ...security.text import printable

MAX_LOG_BYTES = 1 << 20  # read from the end of a run's output
LAST_LINES = 6  # of the output of a failed run, shown in the error
# Signals that end a run, each with the time in s that the run has to end its ranks.
END_SIGNALS = ((signal.SIGINT, 6.0), (signal.SIGTERM, 6.0), (signal.SIGKILL, 10.0))


def run_process(words: list[str], log: Path, limit_s: float | None = None) -> int | None:
    """Run a command with its output in ``log``. Return its exit code; None after ``limit_s``.

    The command has its own process group, so that Ctrl-C reaches it once: from here.
    """
    started: list[subprocess.Popen[bytes]] = []
    failed: list[OSError] = []

    def start() -> None:
        try:
            with log.open("w") as file:
                options: Any = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
                started.append(subprocess.Popen(words, process_group=0, **options))
        except OSError as error:
            failed.append(error)

    # Signals interrupt the main thread only: a process that has started is never lost.
    thread = threading.Thread(target=start)
    try:
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return started[0].wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if thread.ident is not None:
            thread.join()
        for process in started:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run that still runs; a further Ctrl-C does so sooner."""
    for kind, timeout_s in END_SIGNALS:
        if process.poll() is not None:
            return
        process.send_signal(kind)
        try:
            process.wait(timeout_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            continue


def last_lines(log: Path) -> list[str]:
    """Return the last lines that a run has printed."""
    with open(open_regular(log), "rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - MAX_LOG_BYTES, 0))
        text = file.read(MAX_LOG_BYTES).decode(errors="replace")
    said = [printable(line) for line in text.splitlines()]
    lines = [x for x in said if x.strip() and not x.startswith("paceline: the record is in")]
    return lines[-LAST_LINES:] or ["(the script printed nothing)"]


def error_line(last: list[str]) -> str:
    """Return the last line that names an exception, or ""."""
    return next(
        (x.strip() for x in reversed(last) if re.search(r"\b\w*(Error|Exception)\b", x)), ""
    )
