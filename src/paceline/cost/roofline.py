"""Roofline model: the maximum rate of work of some arithmetic intensity on a device.

Williams, Waterman, Patterson: Roofline, an insightful visual performance model for multicore
architectures. Communications of the ACM 52(4), 2009. Attainable FLOP/s = min(peak, intensity x
memory bandwidth), with intensity = FLOP per byte of memory traffic.
"""

from dataclasses import dataclass

from .machine.machine_file import HostFacts


@dataclass(frozen=True)
class Roof:
    """Peak FLOP/s of one precision, and memory bandwidth in bytes/s."""

    peak: float
    bandwidth: float


@dataclass(frozen=True)
class RooflinePoint:
    """A kernel or a step on the roofline."""

    intensity: float  # FLOP/byte; infinite for work without memory traffic
    rate: float  # FLOP/s
    limit: float  # attainable FLOP/s at this intensity
    bound: str  # "compute" or "memory"

    @property
    def share(self) -> float:
        """Measured share of the attainable rate."""
        return self.rate / self.limit


def attainable(intensity: float, peak: float, bandwidth: float) -> float:
    """Return the attainable FLOP/s of work of an intensity in FLOP/byte."""
    _positive("peak", peak)
    _positive("bandwidth", bandwidth)
    if not intensity >= 0:
        raise ValueError(f"intensity={intensity} is negative. HINT: give FLOP per byte moved")
    return min(peak, intensity * bandwidth)


def ridge(peak: float, bandwidth: float) -> float:
    """Return the intensity in FLOP/byte above which arithmetic, and not memory, is the limit."""
    _positive("peak", peak)
    _positive("bandwidth", bandwidth)
    return peak / bandwidth


def place(
    flops: float, bytes_moved: float, seconds: float, *, peak: float, bandwidth: float
) -> RooflinePoint:
    """Place work on the roofline.

    Args:
        flops: Number of floating-point operations.
        bytes_moved: Bytes of memory traffic.
        seconds: Measured time.
        peak: Peak rate in FLOP/s.
        bandwidth: Memory bandwidth in bytes/s.
    """
    _positive("flops", flops)
    _positive("seconds", seconds)
    if not bytes_moved >= 0:
        raise ValueError(
            f"bytes_moved={bytes_moved} is negative. HINT: give bytes of memory traffic"
        )
    intensity = flops / bytes_moved if bytes_moved else float("inf")
    bound = "compute" if intensity >= ridge(peak, bandwidth) else "memory"
    limit = attainable(intensity, peak, bandwidth)
    return RooflinePoint(intensity, flops / seconds, limit, bound)


def roofs(host: HostFacts, device: str = "cpu") -> dict[str, Roof]:
    """Return the measured roofs of a device by precision, the highest first.

    They consist of the rate of matrix products and the triad's bandwidth. The result is empty if
    either was not measured.
    """
    triad = next((memory.triad.median for memory in host.memory if memory.device == device), None)
    if not triad:
        return {}
    found = {
        arithmetic.precision: Roof(arithmetic.rate.median, triad)
        for arithmetic in host.arithmetic
        if arithmetic.device == device
        and arithmetic.operation == "matrix product"
        and arithmetic.rate.median
    }
    return dict(sorted(found.items(), key=lambda item: -item[1].peak))


def _positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ValueError(
            f"{name}={value} is not a positive number. HINT: give FLOP, bytes and seconds"
        )
