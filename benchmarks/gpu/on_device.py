"""Common code of the measurements on a GPU: options, clocks, and peaks of memory."""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from common import machine, options


def device_options(name: str, what: str, repeats: int) -> argparse.ArgumentParser:
    """Return the options of the benchmarks, and those of a measurement on a GPU."""
    parser = options(name, what, repeats)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=50, help="approximate duration")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs")
    return parser


def facts(device: str) -> dict[str, Any]:
    """Return the machine, with its GPU."""
    found = machine()
    if device == "cuda":
        of = torch.cuda.get_device_properties(0)
        found["gpu"] = {"name": of.name, "memory_bytes": of.total_memory}
    return found


def sync(device: str) -> None:
    """Wait for all work of the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any], device: str) -> float:
    """Return the time of a call until the device has ended its work."""
    sync(device)
    start = time.perf_counter()
    work()
    sync(device)
    return time.perf_counter() - start


def peak_of(work: Callable[[], Any], device: str) -> int:
    """Return the largest number of bytes allocated on a GPU during a call; 0 on the CPU."""
    if device != "cuda":
        work()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())
