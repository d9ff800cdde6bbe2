"""On a GPU: what its kernels did, by PyTorch's profiler, in one block of sampled steps.

The host runs ahead of the device, so its times say little there. Kernels become events with the
host's clock: those that compute, merged where they follow each other closely, and each one that
communicates, with the group and number of the collective that launched it.
"""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType, _profiler_enabled

from ..ring.launcher_messages import notify
from ..ring.recorder import Recorder, now
from ..ring.states import State

FIRST_SAMPLED_STEP, SAMPLED_STEPS = 20, 20  # the block of steps that is sampled
MAX_MERGED_GAP_NS = 1_000  # compute kernels this close to each other are one event
COMMUNICATION_LIBRARIES = ("nccl", "rccl", "nvshmem")


@dataclass(frozen=True)
class Kernel:
    """One kernel, copy or fill on the device; times in ns of the profiler's clock."""

    name: str
    start: int
    end: int

    @property
    def communicates(self) -> bool:
        return any(word in self.name.lower() for word in COMMUNICATION_LIBRARIES)


def read_kernels(profiler: Any) -> list[Kernel]:
    """What ran on CUDA devices in a profiler's session that has ended."""
    events = profiler.profiler.kineto_results.events()
    on_device = (e for e in events if e.device_type() == DeviceType.CUDA)
    return [Kernel(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in on_device]


def write_kernels(
    recorder: Recorder, kernels: Iterable[Kernel], offset: int, launched: list[dict[str, int]]
) -> bool:
    """Write kernels as events; whether communication kernels could be told by collective.

    offset: the recorder's clock minus the profiler's (ns). launched: the collectives that this
    rank launched meanwhile, in order. A kernel is the collective in the same place of the order
    where both are as many; else its collective is unknown, and its time is transfer.
    """
    by_start = sorted(kernels, key=lambda kernel: kernel.start)
    computing = [kernel for kernel in by_start if not kernel.communicates]
    talking = [kernel for kernel in by_start if kernel.communicates]
    start = end = count = 0
    for kernel in computing:
        if count and kernel.start <= end + MAX_MERGED_GAP_NS:
            end, count = max(end, kernel.end), count + 1
            continue
        if count:
            recorder.event(State.KERNEL, start + offset, end + offset, amount=count)
        start, end, count = kernel.start, kernel.end, 1
    if count:
        recorder.event(State.KERNEL, start + offset, end + offset, amount=count)
    known = len(talking) == len(launched)
    for i, kernel in enumerate(talking):
        fields = launched[i] if known else {}
        recorder.event(
            State.COMMUNICATION_KERNEL, kernel.start + offset, kernel.end + offset, **fields
        )
    return known


class KernelSampler:
    """Profiles steps FIRST to FIRST + STEPS, unless the script has a session of its own then:
    a second one would silently take the first one's events."""

    def __init__(
        self,
        recorder: Recorder,
        read: Callable[[Any], list[Kernel]] = read_kernels,
        activity: Any = torch.profiler.ProfilerActivity.CUDA,
    ) -> None:
        self.recorder = recorder
        self._read = read
        self._activity = activity
        self._profiler: Any = None
        self._offset = 0
        self._starting = False
        self.first = int(os.environ.get("PACELINE_KERNELS_FROM", FIRST_SAMPLED_STEP))

    def after_step(self) -> None:
        """Called at the end of every step of the job."""
        step = self.recorder.step
        if step == self.first:
            self._begin()
        elif self._profiler is not None and step == self.first + SAMPLED_STEPS:
            self._end()

    def _begin(self) -> None:
        if self._activity not in torch.profiler.supported_activities():
            return
        if _profiler_enabled():
            notify("paceline: the script profiles by itself: kernels are left to it\n")
            return
        self._starting = True
        self._profiler = torch.profiler.profile(activities=[self._activity])
        self._profiler.start()
        self._starting = False
        self.recorder.launched_collectives = []
        self._offset = now() - time.time_ns()

    def _end(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler = self._stopped()
        offset = (self._offset + now() - time.time_ns()) // 2
        launched, self.recorder.launched_collectives = (
            self.recorder.launched_collectives or [],
            None,
        )
        if not write_kernels(self.recorder, self._read(profiler), offset, launched):
            notify(
                "paceline: the communication kernels could not be told by collective: their time "
                "counts as transfer\n"
            )

    def give_way(self) -> None:
        """The script starts a session: ours ends first, and what it saw is forgotten."""
        if self._profiler is not None and not self._starting:
            self._stopped()
            self.recorder.launched_collectives = None
            notify("paceline: the script profiles by itself: kernels are left to it\n")

    def _stopped(self) -> Any:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        return profiler
