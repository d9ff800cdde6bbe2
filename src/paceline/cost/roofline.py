"""The roofline: how fast work of some arithmetic intensity can be on a device at most.

Williams, Waterman, Patterson: Roofline, an insightful visual performance model for multicore
architectures. Communications of the ACM 52(4), 2009. Attainable FLOP/s = min(peak, intensity x
memory bandwidth), with intensity = FLOP per byte of memory traffic."""

from dataclasses import dataclass

from .machine.machine_file import HostFacts


@dataclass(frozen=True)
class Roof:
    """FLOP/s of one precision, and bytes/s of the memory."""

    peak: float
    bandwidth: float


@dataclass(frozen=True)
class Placed:
    """A kernel or a step on the roofline."""

    intensity: float  # FLOP/byte; infinite for work that needs no memory
    rate: float  # FLOP/s
    limit: float  # FLOP/s that are attainable at this intensity
    bound: str  # "compute" or "memory"

    @property
    def share(self) -> float:
        """Of what is attainable."""
        return self.rate / self.limit


def attainable(intensity: float, peak: float, bandwidth: float) -> float:
    """FLOP/s at most for work of so many FLOP/byte."""
    _positive("peak", peak)
    _positive("bandwidth", bandwidth)
    if not intensity >= 0:
        raise ValueError(f"intensity={intensity} is negative. HINT: FLOP per byte moved")
    return min(peak, intensity * bandwidth)


def ridge(peak: float, bandwidth: float) -> float:
    """FLOP/byte from which on the arithmetic is the limit, and no longer the memory."""
    _positive("peak", peak)
    _positive("bandwidth", bandwidth)
    return peak / bandwidth


def place(
    flops: float, bytes_moved: float, seconds: float, *, peak: float, bandwidth: float
) -> Placed:
    """Where work of so many operations and bytes of memory traffic, done in that time, stands."""
    _positive("flops", flops)
    _positive("seconds", seconds)
    if not bytes_moved >= 0:
        raise ValueError(f"bytes_moved={bytes_moved} is negative. HINT: bytes of memory traffic")
    intensity = flops / bytes_moved if bytes_moved else float("inf")
    bound = "compute" if intensity >= ridge(peak, bandwidth) else "memory"
    limit = attainable(intensity, peak, bandwidth)
    return Placed(intensity, flops / seconds, limit, bound)


def roofs(host: HostFacts, device: str = "cpu") -> dict[str, Roof]:
    """The measured roofs of a device, by precision, the highest first: the rate of matrix products
    and the triad's bandwidth. Empty, where either was not measured."""
    triad = next((one.triad.median for one in host.memory if one.device == device), None)
    if not triad:
        return {}
    found = {
        one.precision: Roof(one.rate.median, triad)
        for one in host.arithmetic
        if one.device == device and one.operation == "matrix product" and one.rate.median
    }
    return dict(sorted(found.items(), key=lambda item: -item[1].peak))


def _positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}={value} is no positive number. HINT: FLOP, bytes and seconds")
