"""Sampler of GPU kernels: PyTorch's profiler records them during one block of steps.

Kernels run asynchronously to the CPU code that launches them, so the times that the hooks measure
on the CPU do not show when the GPU computes. Kernels are written as events with times of the
host's clock. Compute kernels with only short gaps between them are merged into one event. Each
communication kernel is one event, with the group and number of the collective that launched it.
"""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType, _profiler_enabled

from ..pending_value import is_capturing
from ..ring.launcher_messages import notify
from ..ring.recorder import Recorder, now
from ..ring.states import State

FIRST_SAMPLED_STEP, SAMPLED_STEPS = 20, 20  # the sampled block of steps
MAX_MERGED_GAP_NS = 1_000  # between compute kernels of one event
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
    """Return the kernels, copies and fills on CUDA devices that a stopped profiler recorded.

    A range of the script (``record_function``) or of NCCL is shown on the device as well, where its
    kernels ran: it is not work of the device.
    """
    events = profiler.profiler.kineto_results.events()
    on_device = (
        e for e in events if e.device_type() == DeviceType.CUDA and not e.is_user_annotation()
    )
    return [Kernel(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in on_device]


def write_kernels(
    recorder: Recorder, kernels: Iterable[Kernel], offset: int, launched: list[dict[str, int]]
) -> bool:
    """Write kernels as events; return whether communication kernels match the collectives.

    The i-th communication kernel is assigned to the i-th collective if there are as many kernels
    as collectives. Otherwise the collective of each kernel is unknown, and its time is counted as
    transfer.

    Args:
        recorder: Recorder that writes the events.
        kernels: Kernels in any order.
        offset: The recorder's clock minus the profiler's clock, in ns.
        launched: The collectives that this rank launched while kernels were sampled, in order.
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
    """Profiler of ``SAMPLED_STEPS`` steps, from ``FIRST_SAMPLED_STEP`` or $PACELINE_KERNELS_FROM.

    Steps count from the start of the process, also in a run that resumes. Nothing is sampled while
    the script runs a profiler itself (a second profiling session would silently take the events of
    the first one), nor started or ended while a step is captured into a CUDA graph.
    """

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
        self._starting = self._has_begun = False
        self._steps = 0
        self.first = int(os.environ.get("PACELINE_KERNELS_FROM", FIRST_SAMPLED_STEP))

    def after_step(self) -> None:
        """Start or end the sampling; called at the end of every training step."""
        self._steps += 1
        if self._steps < self.first or is_capturing():
            return
        if not self._has_begun:
            self._has_begun = True
            self._last = self._steps + SAMPLED_STEPS
            self._begin()
        elif self._steps >= self._last:
            self.finish()

    def finish(self) -> None:
        """Write the kernels of the steps that were sampled so far, and sample no more."""
        if self._profiler is not None:
            self._end()

    def _begin(self) -> None:
        if self._activity not in torch.profiler.supported_activities():
            return
        if _profiler_enabled():
            notify("paceline: the script runs a profiler, so Paceline records no GPU kernels\n")
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
                "paceline: the number of communication kernels differs from that of collectives, "
                "so their time counts as transfer\n"
            )

    def give_way(self) -> None:
        """Stop sampling and discard the kernels, because the script starts a profiler."""
        if self._profiler is not None and not self._starting:
            self._stopped()
            self.recorder.launched_collectives = None
            notify("paceline: the script runs a profiler, so Paceline records no GPU kernels\n")

    def _stopped(self) -> Any:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        return profiler
