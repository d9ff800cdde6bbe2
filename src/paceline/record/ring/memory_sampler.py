"""Samples of a rank's memory, about one a second, in the thread of the stack sampler.

Host memory is the resident memory that no file backs: pages of mapped datasets are not growth.
"""

import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .recorder import Recorder
from .states import Memory, State

MEMORY_INTERVAL_NS = 1_000_000_000
# Until the first sample of the device: a training may be shorter than the other interval.
FIRST_DEVICE_INTERVAL_NS = 50_000_000
UNLIMITED_BYTES = 1 << 60  # a larger limit of cgroup v1 means that there is none
CGROUPS = Path("/sys/fs/cgroup")


class MemorySampler:
    """Writes the memory of the process, and what is left of the node and the device."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._due = self._device_due = 0
        self._cgroups = [x for x in _control_groups() if _limit_and_usage(x)]
        self._device_fails = False

    def sample(self, at: int) -> None:
        """Write the samples that are due. at: now, in ns."""
        if at >= self._due:
            self._due = at + MEMORY_INTERVAL_NS
            try:
                self._write(at, Memory.HOST, own_memory())
                self._write(at, Memory.HOST_AVAILABLE, self._available())
            except (OSError, ValueError, IndexError):
                pass  # not Linux, or without /proc
        if at >= self._device_due and not self._device_fails:
            try:
                is_written = self._device(at)
            except Exception:  # a device that failed must not end the stack sampler
                self._device_fails = True
            else:
                interval = MEMORY_INTERVAL_NS if is_written else FIRST_DEVICE_INTERVAL_NS
                self._device_due = at + interval

    def _write(self, at: int, kind: Memory, count: int) -> None:
        self._recorder.event(State.MEMORY, at, at, amount=max(count, 0), peer=kind)

    def _available(self) -> int:
        return memory_left(self._cgroups)

    def _device(self, at: int) -> bool:
        """Write the memory of the device of which this process uses most, if it uses any."""
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return False
        devices = range(torch.cuda.device_count())
        used = [torch.cuda.memory_allocated(device) for device in devices]
        most = max(devices, key=used.__getitem__)
        if used[most]:
            self._write(at, Memory.DEVICE, used[most])
            total = torch.cuda.get_device_properties(most).total_memory
            self._write(at, Memory.DEVICE_AVAILABLE, total - used[most])
        return bool(used[most])


def own_memory() -> int:
    """Return the resident bytes of this process that no file backs."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def available_memory() -> int:
    """Return the bytes of the node that new allocations may use, by the kernel's estimate."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/meminfo has no MemAvailable")


def memory_left(cgroups: Sequence[Path] | None = None) -> int:
    """Return the bytes that the job may still use on this node, with what its page cache takes.

    cgroups: Folders of control groups; None: those of this process.
    """
    folders = _control_groups() if cgroups is None else cgroups
    left = [room for folder in folders if (room := _left_in(folder)) is not None]
    return min([available_memory(), *left])


def memory_limits() -> list[tuple[int, int]]:
    """Return (allowed bytes, used bytes) of each control group of this process with a limit.

    Control groups of versions 1 and 2 and their parents are included.
    """
    return [found for folder in _control_groups() if (found := _limit_and_usage(folder))]


def _control_groups() -> list[Path]:
    """Return the folders of the control groups of this process for memory, and their parents."""
    found: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        tops = [CGROUPS, CGROUPS / "unified"] if not controllers else []
        if "memory" in controllers.split(","):
            tops = [CGROUPS / "memory"]
        for top in tops:
            place = Path(os.path.normpath(top / name.lstrip("/")))
            folders = [place, *place.parents] if place.is_relative_to(top) else [top]
            found += [folder for folder in folders if folder.is_relative_to(top)]
    return found


def _limit_and_usage(folder: Path) -> tuple[int, int] | None:
    """Return the memory limit of a control group, and its use, in bytes; None without a limit."""
    for names in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit, used = (int((folder / name).read_text()) for name in names)
        except (OSError, ValueError):  # "max": no limit
            continue
        return (limit, used) if limit < UNLIMITED_BYTES else None
    return None


def _left_in(folder: Path) -> int | None:
    """Return the bytes that a cgroup may still use; its page cache can be reclaimed."""
    if (found := _limit_and_usage(folder)) is None:
        return None
    try:
        stat = dict(x.split(" ", 1) for x in (folder / "memory.stat").read_text().splitlines())
        cache = sum(int(stat.get(key, 0)) for key in ("active_file", "inactive_file"))
    except (OSError, ValueError):
        return None
    return found[0] - found[1] + cache
