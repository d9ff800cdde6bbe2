"""Compute speed of devices in FLOP/s: matrix products and convolutions, by precision.

The size grows until one repetition takes some tens of milliseconds, so that neither the overhead of
a call nor the resolution of the clock matters. The operation count of a convolution is that of the
direct algorithm, whichever algorithm the library uses.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from ....cluster.topology.local_resources import free_memory
from ....cost.machine.machine_file import FLOPS, Arithmetic
from .repeat import rate, repeat

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
        call = functools.partial(_finished, call, device)
        times = repeat(call, 0.0, least=2)
        took = min(times)
        if took >= LONG_ENOUGH or size * 2 > most:
            break
        # At most by a factor of 8: small sizes reach a lower rate, so they overestimate the factor.
        size = min(most, size * min(8, max(2, round(1.5 * LONG_ENOUGH / took))))
    times = repeat(call, seconds)
    return Arithmetic(device, operation, precision, rate(amount, times, FLOPS))


def _finished(call: Callable[[], Any], device: str) -> None:
    import torch

    call()
    if device != "cpu":
        torch.cuda.synchronize(device)


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
