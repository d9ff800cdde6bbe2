"""Run several cases of the battery at once, each on its own cores, until a given time."""

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

One = TypeVar("One")
Result = TypeVar("Result")
END_S = 20  # for a command to end its ranks


class CutOffError(Exception):
    """A case was ended before it had a result, because the time was over or by Ctrl-C."""


class Commands:
    """Runs commands, and ends them all when the time is over.

    Args:
        minutes: Time for all commands together.
    """

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes
        self._is_cut_off = False
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()

    @property
    def is_over(self) -> bool:
        return self._is_cut_off or time.monotonic() >= self._end

    def outcome(
        self, command: list[str], folder: Path, limit_s: float
    ) -> tuple[int | None, str, str]:
        """Run a command in a folder.

        Returns:
            Exit code (None: it was ended after ``limit_s``), output and errors.

        Raises:
            CutOffError: The time of all commands was over.
        """
        with self._lock:
            if self.is_over:
                raise CutOffError
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self._running.add(process)
        code: int | None = None
        left_s = max(self._end - time.monotonic(), 0)
        try:
            output, errors = process.communicate(timeout=min(limit_s, left_s))
            code = process.returncode
        except subprocess.TimeoutExpired:
            output, errors = _end(process)
        except BaseException:
            _end(process)
            raise
        finally:
            with self._lock:
                self._running.discard(process)
        if self._is_cut_off or (code is None and left_s < limit_s):
            raise CutOffError
        return code, output, errors

    def cut_off(self) -> None:
        """End all commands; start no others."""
        with self._lock:
            self._is_cut_off = True
            for process in self._running:
                process.send_signal(signal.SIGINT)


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End a command, gently first, so that it ends its ranks."""
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()


def results(
    examine: Callable[[One], Result], todo: Iterable[One], jobs: int, commands: Commands
) -> Iterator[Result]:
    """Yield the results of all cases, as they end; none of those that were cut off."""
    shares: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for share in core_shares(jobs):
        shares.put(share)

    def bind() -> None:
        # On Linux, these are the cores of the calling thread, which its child processes inherit.
        os.sched_setaffinity(0, shares.get())

    with ThreadPoolExecutor(jobs, initializer=bind) as pool:
        futures = [pool.submit(examine, one) for one in todo]
        try:
            for future in as_completed(futures):
                try:
                    yield future.result()
                except CutOffError:
                    continue
        except BaseException:
            commands.cut_off()
            pool.shutdown(cancel_futures=True)
            raise


def core_shares(jobs: int) -> list[list[int]]:
    """Divide the cores of this process into equal parts; if there are too few, all for each."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // jobs
    if not each:
        return [cores] * jobs
    return [cores[each * at : each * (at + 1)] for at in range(jobs)]
