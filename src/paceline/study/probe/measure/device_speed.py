"""Speed of a host's devices: arithmetic and memory bandwidth."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ....cluster.topology.local_resources import free_memory
from ....cluster.topology.topology import read_sysfs
from ....cost.machine.machine_file import BANDWIDTH, FLOPS, Arithmetic, Figure, Memory

# Memory bandwidth: STREAM's triad a = b + s c, in float64.
#
# Bytes are counted as in STREAM, 3 x 8 per element. The read of ``a`` that a CPU makes before it
# writes there, unless it uses non-temporal stores, is not counted.

# Repeated timing of a call within a time budget.


def repeat(call: Callable[[], Any], seconds: float, least: int = 5, most: int = 500) -> list[float]:
    """Return the seconds of each repetition, without a first call that warms up.

    Args:
        seconds: Time budget.
        least: Minimum number of repetitions, also beyond the budget.
        most: Maximum number of repetitions.
    """
    call()
    found: list[float] = []
    start = end = time.perf_counter()
    while len(found) < least or (end - start < seconds and len(found) < most):
        before = time.perf_counter()
        call()
        end = time.perf_counter()
        found.append(max(end - before, 1e-9))
    return found


def synchronized(call: Callable[[], Any], device: Any) -> Callable[[], Any]:
    """Return a function that calls ``call``, and waits until a GPU has computed it."""
    import torch

    if torch.device(device).type == "cpu":
        return call

    def call_and_wait() -> None:
        call()
        torch.cuda.synchronize(device)

    return call_and_wait


def rate(amount: float, times: list[float], unit: str) -> Figure:
    """Return the rates of an amount that was processed in each of these times (seconds)."""
    return Figure.of([amount / seconds for seconds in times], unit)


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

        call = synchronized(functools.partial(torch.add, b, c, alpha=3.0, out=a), device)
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


# Compute speed of devices in FLOP/s: matrix products and convolutions, by precision.
#
# The size grows until one repetition takes some tens of milliseconds, so that neither the overhead
# of a call nor the resolution of the clock matters. The operation count of a convolution is that
# of the direct algorithm, whichever algorithm the library uses.

CPU = ("float32", "float64", "bfloat16")
CUDA = ("float64", "float32", "tf32", "float16", "bfloat16")
LONG_ENOUGH = 0.02  # minimum seconds of one repetition
CHANNELS, PIXELS, KERNEL = 256, 14, 3  # a late convolution layer of a ResNet, with many channels

# A function of size, dtype and device that returns a call and its number of operations.
Work = Callable[[int, Any, str], tuple[Callable[[], Any], float]]


def arithmetic(device: str, seconds: float, threads: int = 1) -> list[Arithmetic]:
    """Measure every operation and precision on a device; unsupported combinations are left out.

    Args:
        device: "cpu", or a device such as "cuda:0".
        seconds: Approximate time for each combination.
        threads: CPU threads, if the device is "cpu".
    """
    import torch

    found = []
    before = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(threads)
    try:
        for operation, work in (("matrix product", _product), ("convolution", _convolution)):
            for precision in CPU if device == "cpu" else CUDA:
                try:
                    with torch.no_grad(), _tf32(device, precision == "tf32"):
                        found.append(_measured(device, operation, precision, work, seconds))
                except (RuntimeError, NotImplementedError):  # not on this device
                    continue
    finally:
        torch.set_num_threads(before)
        if device != "cpu":
            torch.cuda.empty_cache()
    return found


def _measured(
    device: str, operation: str, precision: str, work: Work, seconds: float
) -> Arithmetic:
    import torch

    dtype = torch.float32 if precision == "tf32" else getattr(torch, precision)
    size, most = 1, _largest(operation, device)
    while True:
        call, amount = work(size, dtype, device)
        call = synchronized(call, device)
        times = repeat(call, 0.0, least=2)
        took = min(times)
        if took >= LONG_ENOUGH or size * 2 > most:
            break
        # At most by a factor of 8: small sizes reach a lower rate, so they overestimate the factor.
        size = min(most, size * min(8, max(2, round(1.5 * LONG_ENOUGH / took))))
    times = repeat(call, seconds)
    return Arithmetic(device, operation, precision, rate(amount, times, FLOPS))


def _product(size: int, dtype: Any, device: str) -> tuple[Callable[[], Any], float]:
    """Multiply square matrices with about ``size`` times the operations of 256 x 256 ones."""
    import torch

    n = round(256 * size ** (1 / 3) / 64) * 64
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2.0 * n**3


def _convolution(size: int, dtype: Any, device: str) -> tuple[Callable[[], Any], float]:
    """Convolve a batch of ``size`` images in channels-last layout, which libraries prefer."""
    import torch

    def random(*shape: int) -> Any:
        drawn = torch.randn(*shape, device=device).to(dtype)
        return drawn.contiguous(memory_format=torch.channels_last)

    images = random(size, CHANNELS, PIXELS, PIXELS)
    weights = random(CHANNELS, CHANNELS, KERNEL, KERNEL)
    call = functools.partial(torch.nn.functional.conv2d, images, weights, padding=1)
    return call, 2.0 * size * PIXELS**2 * CHANNELS**2 * KERNEL**2


def _largest(operation: str, device: str) -> int:
    """Return the largest size that uses at most a quarter of the free memory."""
    import torch

    free = free_memory() if device == "cpu" else torch.cuda.mem_get_info(device)[0]
    if operation == "matrix product":
        return int((free / 4 / (3 * 8)) ** 1.5 / 256**3) + 1
    # Inputs and outputs, twice; on a CPU also the unfolded images, one copy per kernel element.
    copies = 4 + (KERNEL**2 if device == "cpu" else 0)
    return int(free / 4 / (8 * CHANNELS * PIXELS**2 * copies)) + 1


@contextlib.contextmanager
def _tf32(device: str, allowed: bool) -> Iterator[None]:
    """Set whether a GPU may compute float32 as TF32 (matmul and cuDNN); restore it afterwards."""
    import torch

    if device == "cpu":
        yield
        return

    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    switches: tuple[Any, ...]
    value: str | bool
    if hasattr(matmul, "fp32_precision"):  # PyTorch 2.9, which warns of the older switches
        switches, name, value = (matmul, cudnn.conv), "fp32_precision", _PRECISION[allowed]
    else:
        switches, name, value = (matmul, cudnn), "allow_tf32", allowed
    before = [getattr(switch, name) for switch in switches]
    try:
        for switch in switches:
            setattr(switch, name, value)
        yield
    finally:
        for switch, old in zip(switches, before, strict=True):
            setattr(switch, name, old)


_PRECISION = {True: "tf32", False: "ieee"}
