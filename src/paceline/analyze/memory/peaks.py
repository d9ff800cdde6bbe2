"""The largest memory of each rank, and the part of it that models and optimizers take."""

from dataclasses import dataclass

from ...record.ring.header_schema import TensorBytes
from ...record.ring.states import Memory, State
from ..records.read_record import Record
from .growth import DEVICE, HOST


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
