"""Memory bandwidth: STREAM's triad a = b + s c, in float64.

Bytes are counted as in STREAM, 3 x 8 per element. The read of ``a`` that a CPU makes before it
writes there, unless it uses non-temporal stores, is not counted.
"""

from collections.abc import Iterable
from pathlib import Path

from ....cluster.topology.local_resources import free_memory
from ....cluster.topology.topology import read_sysfs
from ....cost.machine.machine_file import BANDWIDTH, Memory
from .repeat import rate, repeat

DOUBLE = 8
UNKNOWN_CACHE = 64 << 20
MIN_BYTES, MIN_GPU_BYTES = 32 << 20, 1 << 30  # of an array; a GPU's triad must outlast its launch
SIZES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def triad(device: str, seconds: float, cpus: Iterable[int] = (), threads: int = 1) -> Memory:
    """Measure the memory bandwidth of a device.

    Each array has at least four times the size of the last-level caches, but at most an eighth of
    the free memory.

    Args:
        device: "cpu", or a device such as "cuda:0".
        seconds: Approximate time for the measurement.
        cpus: Hardware threads whose caches count, if the device is "cpu".
        threads: CPU threads, if the device is "cpu".

    Raises:
        ValueError: The result of the triad is wrong.
    """
    import torch

    if device == "cpu":
        caches, free = last_level_caches(cpus), free_memory()
    else:
        of_device = torch.cuda.get_device_properties(device)
        caches = int(getattr(of_device, "L2_cache_size", UNKNOWN_CACHE))
        free = torch.cuda.mem_get_info(device)[0]
    least = MIN_BYTES if device == "cpu" else MIN_GPU_BYTES
    count = min(max(4 * caches, least), free // 8) // DOUBLE
    before = torch.get_num_threads()
    try:
        if device == "cpu":
            torch.set_num_threads(threads)
        a, b, c = (torch.empty(count, dtype=torch.float64, device=device) for _ in range(3))
        for array, value in ((a, 0.0), (b, 1.0), (c, 2.0)):
            array.fill_(value)  # first touch by the threads that use it places it on their node

        def call() -> None:
            torch.add(b, c, alpha=3.0, out=a)
            if device != "cpu":
                torch.cuda.synchronize(device)

        times = repeat(call, seconds)
        if not bool((a == 7.0).all()):
            raise ValueError(
                f"{device}: the triad 1 + 3 x 2 is not 7 everywhere. HINT: test the memory"
            )
    finally:
        torch.set_num_threads(before)
    return Memory(device, rate(3 * DOUBLE * count, times, BANDWIDTH))


def last_level_caches(cpus: Iterable[int], root: Path = Path("/")) -> int:
    """Return the total bytes of the last-level caches of these hardware threads."""
    found: dict[tuple[int, str], int] = {}
    for cpu in cpus:
        levels = {}
        for folder in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index[0-9]*"):
            size, shared = read_sysfs(folder / "size"), read_sysfs(folder / "shared_cpu_list")
            level = read_sysfs(folder / "level")
            if (
                level.isdigit()
                and size[:-1].isdigit()
                and read_sysfs(folder / "type") != "Instruction"
            ):
                levels[int(level)] = shared, int(size[:-1]) * SIZES.get(size[-1], 1)
        if levels:
            last = max(levels)
            shared, size_bytes = levels[last]
            found[last, shared] = size_bytes
    return sum(found.values()) or UNKNOWN_CACHE
