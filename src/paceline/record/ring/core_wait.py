"""Time in which threads of a rank were ready to run and had no core (the kernel's run delay).

The run delay of the training thread is read where its state changes, so that it can be taken out of
the state in which it lay. The run delay of the rank's other threads, and of its child processes
(workers of a loader), is sampled about once a second, beside the states.
"""

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .states import CoreWait, State


def native_thread_id(ident: int) -> int | None:
    """Return the kernel's id (Linux: TID) of a thread of this process.

    ``threading.Thread.native_id`` of the main thread is that of the parent process after a fork
    (Python 3.11 and 3.12). The main thread's TID is the PID.

    Args:
        ident: ``threading.get_ident()`` of the thread.

    Returns:
        None if Python does not know the thread, or it has not begun.
    """
    if ident == threading.main_thread().ident:
        return os.getpid()
    threads = {thread.ident: thread.native_id for thread in threading.enumerate()}
    return threads.get(ident)


MIN_WAIT_NS = 50_000  # a shorter wait is added to the next one, so that it costs no event
MIN_INTERVAL_NS = 200_000  # between two readings, of about 2 µs each: at most 1 % of the time
SAMPLE_INTERVAL_NS = 1_000_000_000
MAX_COST_SHARE = 0.005  # of a core, for the samples of all threads
MAX_SAMPLED_THREADS = 1024  # of a rank, and of its child processes
MIN_BUSY_SHARE = 0.05  # of an interval; a thread that runs or waits for a core less is idle
_SCHEDSTAT_BYTES = 64
_now = time.monotonic_ns

ThreadTimes = dict[str, tuple[int, int]]  # by id of the thread


class ThreadSchedule:
    """Reader of the times of a thread of this process, of a file that is kept open."""

    def __init__(self, ident: int) -> None:
        """ident: ``threading.get_ident()`` of the thread."""
        self._fd = -1
        with suppress(OSError):  # not Linux, or a kernel without these counters
            place = f"/proc/self/task/{native_thread_id(ident)}/schedstat"
            self._fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> tuple[int, int] | None:
        """Return the ns that the thread ran, and that it waited for a core; None if unknown."""
        try:
            ran, waited, _ = os.pread(self._fd, _SCHEDSTAT_BYTES, 0).split()
            return int(ran), int(waited)
        except (OSError, ValueError):  # the thread ended, or the script closed the file
            return None

    def close(self) -> None:
        with suppress(OSError):  # closed by the script
            os.close(self._fd)


class TrainingCoreWait:
    """The run delay of the training thread, from one reading to the next.

    ``reads`` counts the readings. The kept file is the training thread's, whichever thread reads.
    """

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._thread = 0
        self._schedule: ThreadSchedule | None = None
        self._at, self._waited = _now(), 0
        self.reads = 0

    def read(self, at: int) -> None:
        """Write an event with the run delay since the last reading, if there was one.

        at: Time (ns) at which a state begins or ends. Nothing is read if the last reading was after
        it or just before it.
        """
        if at - self._at < MIN_INTERVAL_NS:
            return
        if self._thread != self._recorder.training_thread:
            self._open()
        times = self._schedule.read() if self._schedule is not None else None
        if times is None:
            self._schedule = None  # without closing: the number of its file may be another one's
            return
        self.reads += 1
        start, self._at = self._at, _now()
        if times[1] - self._waited >= MIN_WAIT_NS:
            delay, self._waited = times[1] - self._waited, times[1]
            self._recorder.event(State.STARVED, start, self._at, amount=delay)

    def _open(self) -> None:
        """Open the counters of the thread that trains now, and begin with its next reading."""
        self.close()
        self._thread = self._recorder.training_thread
        self._schedule = ThreadSchedule(self._thread)
        _, self._waited = self._schedule.read() or (0, 0)
        self._at = _now()

    def close(self) -> None:
        """Close the kept file."""
        if self._schedule is not None:
            self._schedule.close()
            self._schedule = None


class OtherCoreWait:
    """Samples of the run delay of a rank's other threads and of its child processes."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._before: dict[CoreWait, ThreadTimes] = {}
        self._at = self._due = 0

    def sample(self, at: int) -> None:
        """Write one sample, if the last one is old enough. at: now, in ns."""
        if at < self._due:
            return
        began = time.thread_time_ns()
        training = str(native_thread_id(self._recorder.training_thread))
        own = thread_times(["self"])
        own.pop(training, None)
        self._write(CoreWait.THREADS, own, at)
        self._write(CoreWait.CHILDREN, thread_times(child_pids()), at)
        cost = time.thread_time_ns() - began
        self._at, self._due = at, at + max(SAMPLE_INTERVAL_NS, int(cost / MAX_COST_SHARE))

    def _write(self, kind: CoreWait, now: ThreadTimes, at: int) -> None:
        before = self._before.get(kind)
        self._before[kind] = now
        if before is None or not now:
            return
        busy, delay = busy_threads(before, now, at - self._at)
        self._recorder.event(
            State.OTHERS_STARVED, self._at, at, amount=delay, seq=busy, peer=int(kind)
        )


def thread_times(pids: Iterable[str]) -> ThreadTimes:
    """Return for each thread of these processes the ns that it ran, and that it waited for a core.

    pids: Process ids, or "self".
    """
    places = [(task, f"{pid}/task/{task}") for pid in pids for task in _tasks(pid)]
    found = {}
    for task, place in places[:MAX_SAMPLED_THREADS]:
        try:
            with open(f"/proc/{place}/schedstat", "rb", buffering=0) as file:
                ran, waited, *_ = file.read(_SCHEDSTAT_BYTES).split()
            found[task] = (int(ran), int(waited))
        except (OSError, ValueError):  # the thread has just ended
            continue
    return found


def busy_threads(before: ThreadTimes, after: ThreadTimes, length: int) -> tuple[int, int]:
    """Return the number of threads that were not idle between two readings, and their run delays.

    Both in ns; ``length``: from one to the other. A thread that is new has waited since then only.
    """
    busy = delay = 0
    for task, (ran, waited) in after.items():
        ran_before, waited_before = before.get(task, (0, 0))
        ran, waited = max(ran - ran_before, 0), max(waited - waited_before, 0)
        busy += ran + waited >= MIN_BUSY_SHARE * length
        delay += waited
    return busy, delay


def child_pids() -> list[str]:
    """Return the ids of the child processes of this process, e.g. workers of a loader."""
    try:
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    except OSError:
        return []


def _tasks(pid: str) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:  # not Linux, or the process has just ended
        return []
