"""Memory that grows steadily: its rate with an interval, and when it ends the job.

A series begins with the first step, and is divided into blocks of equal length, after warm-up.
Memory grows if both the minimum and the maximum of the blocks rise from each block to the next, and
as fast at the end as at the beginning: a cache that fills up slows down, and epochs that go up and
down return to their minimum.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...record.ring.header_schema import TensorBytes
from ...record.ring.states import Memory, State
from ..records.read_record import Record

HOST, DEVICE = "host", "device"
BLOCKS = 6
MIN_SAMPLES = 2 * BLOCKS
WARM_UP = 0.2  # share of the time until the last sample
MIN_SPAN_S = 10.0
MIN_GROWTH_BYTES = 8 << 20  # over the blocks; allocators move by less
MIN_GROWTH_SHARE = 0.01  # of the memory at the end, over the blocks
MIN_STEADY = 0.5  # rate of the second half, relative to that of the first
WARN_HOURS = 24.0  # a job that ends within this time is warned
WARN_SHARE_PER_HOUR = 0.01  # of the memory

Floats = npt.NDArray[np.float64]
_KINDS = {
    HOST: (Memory.HOST, Memory.HOST_AVAILABLE),
    DEVICE: (Memory.DEVICE, Memory.DEVICE_AVAILABLE),
}


@dataclass(frozen=True)
class MemoryGrowth:
    """Steady growth of one rank's memory.

    Attributes:
        kind: HOST or DEVICE.
        bytes: At the end of the record.
        rate: Growth in bytes per second; ``low`` and ``high`` are its interval (5th to 95th
            percentile of the slopes between blocks).
        per_step: Growth in bytes per optimizer step; None without steps.
        available: Bytes that were left at the end: of the node, or of the device. None: unknown.
        hours_left: Hours until nothing is left, if the growth continues; for host memory with the
            growth of all ranks of the node. None: unknown.
    """

    rank: int
    host: str
    kind: str
    bytes: int
    rate: float
    low: float
    high: float
    per_step: float | None
    available: int | None
    hours_left: float | None

    @property
    def ends_job(self) -> bool:
        return self.hours_left is not None and self.hours_left < WARN_HOURS

    @property
    def warned(self) -> bool:
        """Whether the growth matters within a day, or is fast for the memory in use."""
        return self.ends_job or self.rate * 3600 >= WARN_SHARE_PER_HOUR * self.bytes


def find_growth(records: list[Record]) -> list[MemoryGrowth]:
    """Return the steady growth of each rank's host and device memory, the soonest end first."""
    found = []
    for record in records:
        rows = record.events_in(State.MEMORY)
        if rows["step"].max(initial=0):  # imports before the first step take memory as well
            rows = rows[rows["step"] > 0]
        for kind, (own, left) in _KINDS.items():
            used, rest = rows[rows["peer"] == own], rows[rows["peer"] == left]
            slope = steady_slope(used["end"] / 1e9, used["amount"].astype(np.float64))
            if slope is None:
                continue
            rate, low, high = slope
            seconds = float(used["end"][-1] - used["end"][0]) / 1e9
            steps = int(used["step"][-1]) - int(used["step"][0])
            found.append(
                MemoryGrowth(
                    *(record.rank, record.host, kind, int(used["amount"][-1]), rate, low, high),
                    per_step=rate * seconds / steps if steps > 0 else None,
                    available=int(rest["amount"][-1]) if len(rest) else None,
                    hours_left=None,
                )
            )
    grown = [replace(one, hours_left=_hours_left(one, found)) for one in found]
    return sorted(grown, key=lambda one: one.hours_left if one.hours_left is not None else np.inf)


def _hours_left(one: MemoryGrowth, all_growth: list[MemoryGrowth]) -> float | None:
    """Return the hours until the memory is used up; the ranks of a node share its memory."""
    if one.available is None:
        return None
    rate, available = one.rate, one.available
    if one.kind == HOST:
        on_host = [x for x in all_growth if (x.host, x.kind) == (one.host, HOST)]
        rate = sum(x.rate for x in on_host)
        available = min(x.available for x in on_host if x.available is not None)
    return available / rate / 3600


def steady_slope(times: Floats, values: Floats) -> tuple[float, float, float] | None:
    """Return the slope of a series with its interval, in units per second; None if it is not
    steady growth.

    times: Seconds, increasing; shape (n,). values: Shape (n,).
    """
    if len(times) < MIN_SAMPLES:
        return None
    kept = times >= times[0] + WARM_UP * (times[-1] - times[0])
    times, values = times[kept], values[kept]
    if len(times) < MIN_SAMPLES or times[-1] - times[0] < MIN_SPAN_S:
        return None
    blocks = np.array_split(np.arange(len(times)), BLOCKS)
    at = np.array([block[values[block].argmin()] for block in blocks])
    middle, lowest = times[at], values[at]
    highest = np.array([values[block].max() for block in blocks])
    if not ((np.diff(lowest) > 0).all() and (np.diff(highest) > 0).all()):
        return None
    grown = lowest[-1] - lowest[0]
    if grown < max(MIN_GROWTH_BYTES, MIN_GROWTH_SHARE * values[-1]):
        return None
    first, second = np.triu_indices(BLOCKS, 1)
    slopes = (lowest[second] - lowest[first]) / (middle[second] - middle[first])
    half = BLOCKS // 2
    begins, ends = (
        (lowest[i + half - 1] - lowest[i]) / (middle[i + half - 1] - middle[i]) for i in (0, half)
    )
    if ends < MIN_STEADY * begins:
        return None
    low, high = np.percentile(slopes, (5, 95))
    return float(np.median(slopes)), float(low), float(high)


# The largest memory of each rank, and the part of it that models and optimizers take.


@dataclass(frozen=True)
class MemoryPeak:
    """The largest memory of a rank in its samples, or as the device reports it.

    Attributes:
        kind: DEVICE where the rank used one, else HOST.
        bytes: All memory of the process (HOST), or what PyTorch allocated (DEVICE).
        layout: Layout of the models of ``world.distribute``.
        parameters, buffers, gradients, optimizer_states: Bytes of the rank's part of them.
        rest: Activations, workspace, unsharded blocks; for HOST also the interpreter and data.
        offloaded: Bytes of models and optimizers in the host's memory of a rank that uses a device.
        predicted: Peak that was predicted before the training; None: there was no prediction.
    """

    rank: int
    host: str
    kind: str
    bytes: int
    layout: str
    parameters: int
    buffers: int
    gradients: int
    optimizer_states: int
    rest: int
    offloaded: int
    predicted: int | None


def find_peaks(records: list[Record]) -> list[MemoryPeak]:
    """Return the peaks of the ranks with a model of ``world.distribute``, the largest first."""
    found = [
        peak
        for record in records
        if (tensors := record.meta.get("tensors")) is not None
        and (peak := _peak(record, tensors)) is not None
    ]
    return sorted(found, key=lambda peak: -peak.bytes)


def _peak(record: Record, tensors: TensorBytes) -> MemoryPeak | None:
    rows = record.events_in(State.MEMORY)
    host, device = (
        int(rows[rows["peer"] == one]["amount"].max(initial=0))
        for one in (Memory.HOST, Memory.DEVICE)
    )
    device = max(device, tensors.get("device_peak", 0))
    kind, size = (DEVICE, device) if device else (HOST, host)
    if not size:
        return None
    parts = {
        "parameters": tensors["parameters"],
        "buffers": tensors["buffers"],
        "gradients": tensors["gradients"],
        "optimizer_states": tensors["optimizer_states"],
    }
    return MemoryPeak(
        record.rank,
        record.host,
        kind,
        size,
        tensors["layout"],
        **parts,
        rest=max(size - sum(parts.values()), 0),
        offloaded=tensors.get("offloaded", 0),
        predicted=tensors.get("predicted_peak"),
    )
