"""Measure the peak of a step's memory in PyTorch's CPU allocator.

The profiler reports every allocation of PyTorch's CPU allocator, in bytes as requested. Resident
memory (RSS) is not used: it counts the C library's unused pages and the process's code. Scratch
memory that oneDNN or BLAS allocate themselves is in neither the measured nor the predicted peak.
"""

import gc
import json
from collections.abc import Callable

import torch

from paceline.parallel.memory.trace import TRACED_STEPS, TrainingStep
from paceline.security.removal import TemporaryFolder


def measure_peak(build: Callable[[], TrainingStep]) -> int:
    """Return the peak of the CPU allocator in bytes, from building the models over two steps."""

    def build_and_run() -> None:
        step = build()
        for _ in range(TRACED_STEPS):
            step.run()

    return measure_growth(build_and_run)


def measure_growth(run: Callable[[], None]) -> int:
    """Return the peak of the CPU allocator during a call, in bytes above its level before."""
    gc.collect()  # memory of earlier steps, freed during this one, would count against it
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    with TemporaryFolder() as folder:
        path = folder / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    allocations = sorted(
        (
            event
            for event in events
            if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0
        ),
        key=lambda event: event["ts"],
    )
    assert allocations, "the profiler reported no allocation"
    # The profiler's total goes on from earlier profiles of the process.
    first = allocations[0]["args"]
    before = first["Total Allocated"] - first["Bytes"]
    return int(max(event["args"]["Total Allocated"] for event in allocations) - before)
