"""How fast devices compute: matrix products and convolutions by precision, in FLOP/s.

The size grows until one repetition takes some tens of milliseconds, so that neither a call's own
cost nor the clock counts. A convolution's operations are those of the direct algorithm, whatever
the library does."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from ....cluster.topology.local_resources import free_memory
from ....cost.machine.machine_file import FLOPS, Arithmetic
from .repeat import rate, repeated

CPU = ("float32", "float64", "bfloat16")
CUDA = ("float64", "float32", "tf32", "float16", "bfloat16")
LONG_ENOUGH = 0.02  # seconds of one repetition
CHANNELS, PIXELS, KERNEL = 256, 14, 3  # a layer of a ResNet, one of those with most channels

# So much of a size: what to call, its operations and its bytes.
Work = Callable[[int, Any, str], tuple[Callable[[], Any], float]]


def arithmetic(device: str, seconds: float, threads: int = 1) -> list[Arithmetic]:
    """Every operation and precision on a device; threads: of the processor, where it is "cpu".
    What a device can't do is left out. seconds: of each figure, about."""
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
        times = repeated(call, 0.0, least=2)
        took = min(times)
        if took >= LONG_ENOUGH or size * 2 > most:
            break
        # By no more than 8 at once: small ones are slower for what they are.
        size = min(most, size * min(8, max(2, round(1.5 * LONG_ENOUGH / took))))
    times = repeated(call, seconds)
    return Arithmetic(device, operation, precision, rate(amount, times, FLOPS))


def _finished(call: Callable[[], Any], device: str) -> None:
    import torch

    call()
    if device != "cpu":
        torch.cuda.synchronize(device)


def _product(size: int, dtype: Any, device: str) -> tuple[Callable[[], Any], float]:
    """Square matrices whose product is about ``size`` times that of 256 x 256."""
    import torch

    n = round(256 * size ** (1 / 3) / 64) * 64
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2.0 * n**3


def _convolution(size: int, dtype: Any, device: str) -> tuple[Callable[[], Any], float]:
    """A batch of ``size`` images, laid out as the libraries like it best."""
    import torch

    def random(*shape: int) -> Any:
        drawn = torch.randn(*shape, device=device).to(dtype)
        return drawn.contiguous(memory_format=torch.channels_last)

    images = random(size, CHANNELS, PIXELS, PIXELS)
    weights = random(CHANNELS, CHANNELS, KERNEL, KERNEL)
    call = functools.partial(torch.nn.functional.conv2d, images, weights, padding=1)
    return call, 2.0 * size * PIXELS**2 * CHANNELS**2 * KERNEL**2


def _largest(operation: str, device: str) -> int:
    """The largest size that leaves three quarters of the free memory free."""
    import torch

    free = free_memory() if device == "cpu" else torch.cuda.mem_get_info(device)[0]
    if operation == "matrix product":
        return int((free / 4 / (3 * 8)) ** 1.5 / 256**3) + 1
    # In and out, twice; on a processor also the images unfolded, once for each of the kernel.
    copies = 4 + (KERNEL**2 if device == "cpu" else 0)
    return int(free / 4 / (8 * CHANNELS * PIXELS**2 * copies)) + 1


@contextlib.contextmanager
def _tf32(device: str, allowed: bool) -> Iterator[None]:
    """Whether a GPU may compute float32 as TF32: both of PyTorch's switches, and back after it."""
    import torch

    if device == "cpu":
        yield
        return

    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = allowed
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value
