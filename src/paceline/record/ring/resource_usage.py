"""Resource usage of a rank: CPU time, page faults, files, and CPU use of other processes.

All figures come from /proc as cumulative counters. The usage of an interval is the difference of
two readings.
"""

import mmap
import os
import re
import resource
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ...security.processes import stat_fields
from .core_wait import child_pids, native_thread_id, thread_times
from .recorder import now
from .stack_sampler import frame_line, script_frame

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = mmap.PAGESIZE
# Name prefixes of Python threads of Paceline or a DataLoader, which are not reported.
OWN = ("paceline", "QueueFeederThread")
MAX_THREADS = 1024  # whose last opened file is known


def read_usage() -> dict[str, float]:
    """Return cumulative counters of the calling (training) thread, its process and its host.

    All values are in seconds, except ``faults``:

    - seconds: Time of the monotonic clock.
    - thread: Time that the calling thread ran on a core.
    - delayed: Time that the calling thread was ready to run and waited for a core.
    - crowded: Time that the other threads of the process (e.g. of the exchange) waited for a core.
    - process: CPU time of all threads of the process.
    - system: The part of ``process`` that was spent in the kernel.
    - children: CPU time of the running child processes.
    - faults: Number of minor page faults.
    - host: CPU time of all processes on the cores that this process may use.
    - squeezed: Time in which at least one process of the host waited for memory.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    threads = thread_times(["self"])
    ran, waited = threads.pop(str(threading.get_native_id()), (0, 0))
    return {
        "seconds": now() / 1e9,
        "thread": ran / 1e9,
        "delayed": waited / 1e9,
        "crowded": sum(waited for _, waited in threads.values()) / 1e9,
        "process": used.ru_utime + used.ru_stime,
        "system": used.ru_stime,
        "children": sum(map(sum, map(cpu_seconds, child_pids()))),
        "faults": float(used.ru_minflt),
        "host": _host(),
        "squeezed": _squeezed(),
    }


def usage_between(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return the difference of two results of ``read_usage``."""
    return {name: after[name] - before[name] for name in before}


def cpu_seconds(pid: str) -> tuple[float, float]:
    """Return the CPU seconds of a process in user mode and in the kernel."""
    fields = stat_fields(pid)
    if not fields:  # the process has just ended
        return 0.0, 0.0
    return int(fields[11]) / TICKS, int(fields[12]) / TICKS


def bytes_read(pid: str) -> tuple[int, int]:
    """Return the bytes that a process has read, and those of them that came from storage.

    The former include pipes, sockets and the page cache.
    """
    try:
        words = Path(f"/proc/{pid}/io").read_text().split()
        return int(words[1]), int(words[words.index("read_bytes:") + 1])
    except (OSError, ValueError, IndexError):
        return 0, 0


def _host() -> float:
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    busy = 0
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            name, *ticks = line.split()
            if name in mine:
                user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, ticks)
                busy += user + nice + system + irq + softirq
    except (OSError, ValueError):
        return 0.0
    return busy / TICKS


def _squeezed() -> float:
    try:
        some = Path("/proc/pressure/memory").read_text().splitlines()[0]
        return int(some.rpartition("=")[2]) / 1e6
    except (OSError, ValueError, IndexError):
        return 0.0


class OtherThreads:
    """CPU time of the script's Python threads other than the training thread.

    These threads hold the global interpreter lock while they compute.
    """

    def __init__(self) -> None:
        self._before = self._seconds()

    def busiest(self) -> dict[str, Any]:
        """Return the thread with the most CPU time since this object was created.

        Returns the CPU seconds of all these threads, and the name of the busiest one with the file
        and line of the script that it executes. The result is empty if there are no such threads.
        """
        spent = {
            thread: seconds - self._before.get(thread, 0.0)
            for thread, seconds in self._seconds().items()
        }
        if not spent:
            return {}
        most = max(spent, key=spent.__getitem__)
        found: dict[str, Any] = {"seconds": sum(spent.values()), "name": most.name[:40]}
        if frame := script_frame(sys._current_frames().get(most.ident or 0)):
            found |= {"file": frame.f_code.co_filename[-120:], "line": frame_line(frame)}
        return found

    def _seconds(self) -> dict[threading.Thread, float]:
        mine, times = threading.current_thread(), thread_times(["self"])
        return {
            thread: times.get(str(native_thread_id(thread.ident or 0)), (0, 0))[0] / 1e9
            for thread in threading.enumerate()
            if thread is not mine and not thread.name.startswith(OWN)
        }


class FileOpenCounter:
    """Number of files that Python opens in this process and in the processes that it forks.

    The counter is in shared memory. It is not atomic: when two processes count at the same time,
    one of the two may be missed.
    """

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 8)
        self._last_paths: dict[int, str] = {}
        sys.addaudithook(self._hear)

    def __int__(self) -> int:
        return int(struct.unpack("q", self._shared[:8])[0])

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | bytes) and not _no_data(args[0]):
            self._shared[:8] = struct.pack("q", int(self) + 1)
            if len(self._last_paths) < MAX_THREADS or threading.get_ident() in self._last_paths:
                self._last_paths[threading.get_ident()] = os.fsdecode(args[0])

    def last_path(self, thread: int) -> str:
        """Return the file that a thread of this process opened last, with "#" for its numbers."""
        folder, slash, name = self._last_paths.get(thread, "").rpartition("/")
        return folder + slash + re.sub(r"\d+", "#", name)


def _no_data(path: str | bytes) -> bool:
    return os.fsdecode(path).startswith(("/proc/", "/dev/", "/sys/"))


def measure_open_s(times: int = 200) -> float:
    """Return the seconds to open and read a small file that is in the page cache."""
    path = os.path.realpath(__file__)
    start = now()
    for _ in range(times):
        with open(path, "rb") as file:
            file.read(PAGE)
    return (now() - start) / 1e9 / times


def measure_page_fault_s(size: int = 8 << 20) -> float:
    """Return the seconds that the first access to a page takes: fault, zeroing, page table.

    The same writes once more, to pages that are there now, are subtracted. The thread's CPU time
    is exact, where getrusage's kernel time is sampled and can be 0 for some milliseconds.
    """
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        room.madvise(mmap.MADV_NOHUGEPAGE)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    first = _write_each_page(room)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    again = _write_each_page(room)
    room.close()
    return max(first - again, 0.0) / max(faults, 1)


def _write_each_page(memory: mmap.mmap) -> float:
    """Return the CPU seconds of writing a byte to each page."""
    start = time.thread_time()
    for at in range(0, len(memory), PAGE):
        memory[at] = 1
    return time.thread_time() - start
