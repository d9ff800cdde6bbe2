"""Watch the machine during a run: clock frequency of its cores, and the load of other processes."""

import os
import resource
import statistics
import threading
import time
from pathlib import Path

from ...analyze.scaling.study_model import MachineState
from ...cluster.topology.local_resources import allowed_threads
from .daemon_processes import DaemonProcesses

INTERVAL_S = 0.5
CPUS = Path("/sys/devices/system/cpu")
STAT = Path("/proc/stat")
IDLE_COLUMNS = (4, 5)  # of the line "cpuN user nice system idle iowait ..."


class MachineWatch:
    """Samples the clock of this process's cores in a thread, from ``start`` to ``stop``.

    The load of others is the processor time of these cores less that of this process's children
    that have ended, and less that of ranks that a daemon has started.

    Args:
        by_daemon: Whether a daemon of the scheduler starts the ranks.
    """

    def __init__(self, by_daemon: bool = False, cpus: Path = CPUS, stat: Path = STAT) -> None:
        self._cores, self._cpus, self._stat = allowed_threads(), cpus, stat
        self._daemon_processes = DaemonProcesses() if by_daemon else None
        self._samples: list[float] = []
        self._over = threading.Event()

    def start(self) -> None:
        """Begin to sample."""
        self._before = self._busy_s(), _children_s(), time.monotonic()
        self._thread = threading.Thread(target=self._sample, name="machine watch", daemon=True)
        self._thread.start()

    def stop(self) -> MachineState:
        """Return what was seen since ``start``."""
        self._over.set()
        self._thread.join()
        busy, children, seconds = self._busy_s(), _children_s(), time.monotonic()
        daemon = self._daemon_processes
        if daemon is not None:
            daemon.sample()
        notes: list[str] = []
        other = None
        if busy is None or self._before[0] is None:
            notes.append(f"the load of other processes can't be read from {self._stat}")
        elif daemon is not None and not daemon.found:
            notes.append(
                "the load of other processes is not known: the scheduler starts the ranks, and "
                "their processes can't be told from others"
            )
        else:
            length = max(seconds - self._before[2], 1e-9)
            ours = children - self._before[1] + (daemon.seconds if daemon is not None else 0.0)
            other = max((busy - self._before[0] - ours) / length, 0.0)
        if not self._samples:
            notes.append(f"the clock frequency can't be read: no cpufreq in {self._cpus}")
            return MachineState(None, None, other, notes)
        mean, low = statistics.fmean(self._samples), min(self._samples)
        return MachineState(mean, low, other, notes)

    def _sample(self) -> None:
        while not self._over.wait(INTERVAL_S):
            if self._daemon_processes is not None:
                self._daemon_processes.sample()
            found = [one for core in self._cores if (one := self._mhz(core)) is not None]
            if found:
                self._samples.append(statistics.fmean(found))

    def _mhz(self, core: int) -> float | None:
        try:
            text = (self._cpus / f"cpu{core}/cpufreq/scaling_cur_freq").read_text()
            return int(text) / 1000
        except (OSError, ValueError):
            return None

    def _busy_s(self) -> float | None:
        """Return the processor time of this process's cores, in s; None if it can't be read."""
        names = {f"cpu{core}" for core in self._cores}
        ticks = 0
        try:
            for line in self._stat.read_text().splitlines():
                words = line.split()
                if words and words[0] in names:
                    numbers = [int(word) for word in words[1:9]]
                    ticks += sum(n for i, n in enumerate(numbers, 1) if i not in IDLE_COLUMNS)
        except (OSError, ValueError):
            return None
        return ticks / os.sysconf("SC_CLK_TCK")


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime + own.ru_utime + own.ru_stime
