"""What a stretch of a rank's life took beside its time: processors, page faults, files, and who
else was busy. All from /proc, as sums that only grow: two looks and their difference."""

import mmap
import os
import resource
import struct
import sys
import threading
from pathlib import Path
from typing import Any

from .recorder import now
from .stack_sampler import LIBRARY_PREFIXES

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = mmap.PAGESIZE
# Threads of Python that belong to this package or to a DataLoader: no surprise to anybody.
OWN = ("paceline", "QueueFeederThread")


def read_usage() -> dict[str, float]:
    """Sums up to now, of the calling thread (which trains), its process and its host.

    seconds: the clock; thread, delayed: of the calling thread, on a core and waiting for one;
    crowded: that its process's other threads (of the exchange, say) waited for one;
    process, system: of all threads, the latter inside the kernel; children: of processes that it
    started and that run; faults: of pages, minor; host: of the cores that this process may run
    on, whoever used them; squeezed: that some process of the host waited for memory.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    thread, delayed = _schedstat("thread-self")
    return {
        "seconds": now() / 1e9,
        "thread": thread,
        "delayed": delayed,
        "crowded": _crowded() - delayed,
        "process": used.ru_utime + used.ru_stime,
        "system": used.ru_stime,
        "children": sum(map(sum, map(cpu_seconds, child_pids()))),
        "faults": float(used.ru_minflt),
        "host": _host(),
        "squeezed": _squeezed(),
    }


def usage_between(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What was used from one look to another."""
    return {name: after[name] - before[name] for name in before}


def child_pids() -> list[str]:
    """Processes that this one has started: a loader's workers."""
    try:
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    except OSError:
        return []


def cpu_seconds(pid: str) -> tuple[float, float]:
    """Seconds that a process computed, outside of the kernel and inside of it."""
    try:
        after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(after[11]) / TICKS, int(after[12]) / TICKS
    except (OSError, ValueError, IndexError):  # it has just ended
        return 0.0, 0.0


def bytes_read(pid: str) -> tuple[int, int]:
    """That a process asked the system for (from files, pipes and sockets), and those of them that
    had to come from storage, as they were not in memory."""
    try:
        words = Path(f"/proc/{pid}/io").read_text().split()
        return int(words[1]), int(words[words.index("read_bytes:") + 1])
    except (OSError, ValueError, IndexError):
        return 0, 0


def _schedstat(place: str) -> tuple[float, float]:
    """Seconds on a core, and seconds ready to run without one."""
    try:
        ran, waited, _ = Path(f"/proc/{place}/schedstat").read_text().split()
        return int(ran) / 1e9, int(waited) / 1e9
    except (OSError, ValueError):
        return 0.0, 0.0


def _crowded() -> float:
    """Of all threads that live."""
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return 0.0
    return sum(_schedstat(f"self/task/{thread}")[1] for thread in threads)


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
    """Python threads of the script beside the one that trains: they hold the interpreter's lock
    while they compute."""

    def __init__(self) -> None:
        self._before = self._seconds()

    def busiest(self) -> dict[str, Any]:
        """The one that computed longest since then: seconds, name, and the line of the script
        that it is in; empty where there is none."""
        spent = {
            thread: seconds - self._before.get(thread, 0.0)
            for thread, seconds in self._seconds().items()
        }
        if not spent:
            return {}
        most = max(spent, key=spent.__getitem__)
        found: dict[str, Any] = {"seconds": sum(spent.values()), "name": most.name[:40]}
        frame = sys._current_frames().get(most.ident or 0)
        while frame is not None and frame.f_code.co_filename.startswith(LIBRARY_PREFIXES):
            frame = frame.f_back
        if frame is not None:
            found |= {"file": frame.f_code.co_filename[-120:], "line": frame.f_lineno}
        return found

    def _seconds(self) -> dict[threading.Thread, float]:
        mine = threading.current_thread()
        return {
            thread: _schedstat(f"self/task/{thread.native_id}")[0]
            for thread in threading.enumerate()
            if thread is not mine and not thread.name.startswith(OWN)
        }


class FileOpenCounter:
    """Files opened by Python, in this process and those that it forks: one number in memory that
    they share. An opening may be missed where two processes count at once."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 8)
        sys.addaudithook(self._hear)

    def __int__(self) -> int:
        return int(struct.unpack("q", self._shared[:8])[0])

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | bytes) and not _no_data(args[0]):
            self._shared[:8] = struct.pack("q", int(self) + 1)


def _no_data(path: str | bytes) -> bool:
    return os.fsdecode(path).startswith(("/proc/", "/dev/", "/sys/"))


def measure_open_s(times: int = 200) -> float:
    """What it takes here to open and read a small file that is in memory already."""
    path = os.path.realpath(__file__)
    start = now()
    for _ in range(times):
        with open(path, "rb") as file:
            file.read(PAGE)
    return (now() - start) / 1e9 / times


def measure_page_fault_s(size: int = 8 << 20) -> float:
    """What the first touch of a page takes here, all of it: fault, zeroing, page table."""
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        room.madvise(mmap.MADV_NOHUGEPAGE)
    before = resource.getrusage(resource.RUSAGE_SELF)
    for at in range(0, size, PAGE):
        room[at] = 1
    after = resource.getrusage(resource.RUSAGE_SELF)
    room.close()
    faults = max(after.ru_minflt - before.ru_minflt, 1)
    return max(after.ru_stime - before.ru_stime, 0.0) / faults
