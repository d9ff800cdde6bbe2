"""Measure the energy of a run on this node."""

import importlib
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ..topology.visible_gpus import UNKNOWN, visible_devices
from .counters import ALL, Counter, charged_counters, sysfs_counters

# Energy counters of NVIDIA GPUs, by the package nvidia-ml-py.

HINT = "HINT: pip install nvidia-ml-py"


def gpu_counters(root: Path = Path("/"), nvml: Any = None) -> tuple[list[Counter], list[str]]:
    """Return a counter for each visible GPU, and why there is none.

    nvml: The module pynvml; None imports it.
    """
    visible = visible_devices(os.environ, root)
    if not visible:
        return [], []
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return [], [f"the energy of GPUs is unknown without NVML. {HINT}"]
    found, notes = [], list[str]()
    try:
        nvml.nvmlInit()
        for index in visible:
            if index == UNKNOWN:
                notes.append("the energy of a GPU is unknown: its index is not known")
                continue
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            counter = Counter(f"GPU {index}", _reader(nvml, handle), None, "NVML", ALL)
            counter.read_j()
            found.append(counter)
    except nvml.NVMLError as error:  # GPUs before Volta have no counter
        notes.append(f"the energy of GPUs cannot be read: {error}")
    return found, notes


def _reader(nvml: Any, handle: Any) -> Callable[[], float]:
    def read() -> float:
        try:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
        except nvml.NVMLError as error:
            raise OSError(str(error)) from error

    return read


INTERVAL_S = 1.0  # between two readings; RAPL starts again after some minutes at the earliest


@dataclass(frozen=True)
class EnergyUse:
    """Energy from one counter that is charged to the job.

    Attributes:
        source: As in Counter.
        joules: From start to stop.
        is_estimate: Whether it is a share of a counter that covers more than the job.
        how: How it was read and charged.
        within: Source of a counter that contains this one; "" if there is none.
        times: When it was read (s, ``time.monotonic()``).
        charged: Joules charged until then.
    """

    source: str
    joules: float
    is_estimate: bool
    how: str
    within: str = ""
    times: list[float] = field(default_factory=list)
    charged: list[float] = field(default_factory=list)

    def between(self, start: float, end: float) -> float:
        """Return the joules between two times (s, ``time.monotonic()``), interpolated."""
        return max(self._until(end) - self._until(start), 0.0)

    def _until(self, at: float) -> float:
        i = bisect_left(self.times, at)
        if i == 0:
            return 0.0
        if i == len(self.times):
            return self.charged[-1]
        begin, end = self.times[i - 1], self.times[i]
        part = (at - begin) / (end - begin)
        return self.charged[i - 1] + part * (self.charged[i] - self.charged[i - 1])


def total_joules(used: Collection[EnergyUse]) -> float:
    """Return the sum of all counters that no other one contains."""
    return sum(one.joules for one in used if not one.within)


class EnergyMeter:
    """Reads the counters of this node until it is stopped.

    Args:
        root: Root of /sys and /proc.
        nvml: The module pynvml; None imports it if there is a GPU.

    Attributes:
        notes: What cannot be read, and why.
    """

    def __init__(self, root: Path = Path("/"), nvml: Any = None) -> None:
        self._root = root
        self._counters, notes = sysfs_counters(root)
        gpus, more = gpu_counters(root, nvml)
        self._counters += gpus
        self.notes = notes + more
        self._last = [0.0] * len(self._counters)
        self._times: list[float] = []
        self._used: list[list[float]] = [[] for _ in self._counters]
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._read_regularly, daemon=True)

    def start(self) -> Self:
        """Begin to measure."""
        self.sample()
        if self._counters:
            self._thread.start()
        return self

    def stop(self) -> None:
        """End the measurement."""
        if self._thread.is_alive():
            self._ends.set()
            self._thread.join()
        self.sample()

    def charged(self, threads: Collection[int] | None = None) -> list[EnergyUse]:
        """Return what is charged to the job, until the last reading.

        threads: Hardware threads that the job holds; None: those that this process may use.
        """
        whole = {one.source: used for one, used in zip(self._counters, self._used, strict=True)}
        result = []
        for one in charged_counters(self._counters, threads, self._root):
            used = [one.share * joules for joules in whole[one.source]]
            result.append(
                EnergyUse(
                    one.source,
                    used[-1],
                    one.is_estimate,
                    one.how,
                    one.within,
                    list(self._times),
                    used,
                )
            )
        return result

    def sample(self) -> None:
        """Read all counters once.

        A counter that cannot be read any more stays where it was, and ``notes`` says so.
        """
        self._times.append(time.monotonic())
        for i, counter in enumerate(self._counters):
            before, used = self._last[i], self._used[i]
            try:
                now = counter.read_j()
            except (OSError, ValueError):
                note = f"{counter.source}: the counter could not be read all the time"
                if note not in self.notes:
                    self.notes.append(note)
                now = before
            used.append(used[-1] + _difference(before, now, counter) if used else 0.0)
            self._last[i] = now

    def _read_regularly(self) -> None:
        while not self._ends.wait(INTERVAL_S):
            self.sample()


def _difference(before: float, now: float, counter: Counter) -> float:
    """Return the energy between two readings, in which the counter may have started again."""
    if now >= before:
        return now - before
    return now - before + counter.wrap_j if counter.wrap_j is not None else now
