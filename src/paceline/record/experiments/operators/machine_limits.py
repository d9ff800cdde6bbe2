"""Limits of the rank's device, measured in the rank: arithmetic, memory, cost of an operator.

Each figure is the best of a few repetitions, because other programs only make it worse.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PROBE_S = 0.1  # duration of each measurement
REPETITIONS = 100  # of a small operator, per sample
CPU_SIDE, GPU_SIDE = 768, 8192  # rows of the matrices of a product
CPU_ELEMENTS, GPU_ELEMENTS = 1 << 23, 1 << 28  # of each vector of a triad


@dataclass(frozen=True)
class DispatchCost:
    """Seconds of an operator on one element.

    Attributes:
        dispatch_s: As a script calls it, with autograd.
        profiled_s: As the profile measures it.
    """

    dispatch_s: float
    profiled_s: float


class _Timed(TorchDispatchMode):
    """Measures one operator in the same way as the profile does."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds: list[float] = []
        self._clock, self._synchronize = operator_clock(device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._synchronize()
        start = self._clock()
        out = func(*args, **(kwargs or {}))
        self._synchronize()
        self.seconds.append(self._clock() - start)
        return out


def measure_dispatch(device: str) -> DispatchCost:
    """Measure the cost of an operator on one element."""
    _, synchronize = operator_clock(device)
    unit = torch.ones(1, device=device)
    with_gradient = torch.ones(1, device=device, requires_grad=True)
    means = []
    with torch.enable_grad():
        for _ in range(10):
            value = with_gradient
            start = time.perf_counter()
            for _ in range(REPETITIONS):
                value = value + unit
            synchronize()
            means.append((time.perf_counter() - start) / REPETITIONS)
        with _Timed(device) as mode:
            for _ in range(REPETITIONS):
                unit + unit
    return DispatchCost(min(means), sorted(mode.seconds)[REPETITIONS // 4])


def measure_limits(device: str) -> dict[str, float]:
    """Return FLOP/s of float32 products, B/s of a triad, and bytes of memory of the device."""
    clock, synchronize = operator_clock(device)
    on_gpu = device != "cpu"
    side, elements = (GPU_SIDE, GPU_ELEMENTS) if on_gpu else (CPU_SIDE, CPU_ELEMENTS)
    if on_gpu:  # the training may have left little memory
        numbers = _free_bytes(device) // 12  # a third of it, as float32
        side, elements = min(side, int((numbers / 2) ** 0.5)), min(elements, numbers // 3)
    matrix = torch.randn(side, side, device=device)
    out = torch.empty_like(matrix)
    product_s = _best(lambda: torch.mm(matrix, matrix, out=out), clock, synchronize)
    a, b, c = (torch.ones(elements, device=device) for _ in range(3))
    triad_s = _best(lambda: torch.add(a, b, alpha=2, out=c), clock, synchronize)
    if on_gpu:
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "flops_per_s": 2 * side**3 / product_s,
        "bytes_per_s": 3 * a.nbytes / triad_s,
        "memory_bytes": float(memory),
    }


def _free_bytes(device: str) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _best(
    function: Callable[[], Any], clock: Callable[[], float], synchronize: Callable[[], None]
) -> float:
    function()
    synchronize()
    found: list[float] = []
    until = time.perf_counter() + PROBE_S
    while len(found) < 3 or time.perf_counter() < until:
        start = clock()
        function()
        synchronize()
        found.append(clock() - start)
    return min(found)


def operator_clock(device: str) -> tuple[Callable[[], float], Callable[[], None]]:
    """Return the clock for operators, in seconds, and a function that waits for the device.

    On CPUs it is the CPU time of the thread, which does not include waits for a core.
    """
    if device == "cpu":
        return time.thread_time, lambda: None
    return time.perf_counter, lambda: torch.cuda.current_stream().synchronize()
