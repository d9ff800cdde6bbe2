"""Reading a record: the layout is in docs/record-format.md, its writer is record.ring."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..record.ring import EVENT, HEADER, MAGIC, VERSION
from ..record.states import State

EVENT_DTYPE = np.dtype(
    [
        ("start", "<i8"),
        ("end", "<i8"),
        ("amount", "<i8"),
        ("seq", "<u4"),
        ("step", "<u4"),
        ("group", "<u2"),
        ("state", "u1"),
        ("op", "u1"),
        ("peer", "<i4"),
    ]
)
assert EVENT_DTYPE.itemsize == EVENT.size


@dataclass(frozen=True)
class Record:
    """One rank's record: what it says of itself, and its events in the order of writing."""

    meta: dict[str, Any]
    events: npt.NDArray[Any]
    lost: int  # events that the ring has overwritten
    cost_ns: int  # what recording has cost this rank
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)  # of the script, by number

    @property
    def rank(self) -> int:
        return int(self.meta["rank"])

    @property
    def host(self) -> str:
        return str(self.meta["host"])

    @cached_property
    def on_gpu(self) -> bool:
        """Whether it says what a GPU's kernels did."""
        return bool((self.events["state"] == State.KERNEL).any())

    def of(self, *states: int) -> npt.NDArray[Any]:
        """The events of these states."""
        state = self.events["state"]
        if len(states) == 1:
            return np.asarray(self.events[state == states[0]])
        return self.events[np.isin(state, states)]


def used_bytes(data: bytes) -> int:
    """How much of a ring's file has been written to; the rest holds nothing."""
    _, _, header, event, capacity, written, _, _ = HEADER.unpack_from(data)
    return int(header + min(written, capacity) * event)


def read(data: Any, name: str = "the record") -> Record:
    """Parse a record's bytes (or mapped file). ValueError where it is foreign, newer or cut off."""
    if len(data) < HEADER.size or data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"{name} is not a record of Paceline. HINT: a rank-N.ring file")
    _, version, header, event, capacity, written, cost, length = HEADER.unpack_from(data)
    if version > VERSION:
        raise ValueError(
            f"{name} has version {version}, this Paceline reads up to {VERSION}. HINT: update it"
        )
    used = min(written, capacity)
    if event != EVENT.size or len(data) < header + used * event or HEADER.size + length > header:
        raise ValueError(f"{name} is cut off or damaged ({len(data)} bytes)")
    meta = json.loads(data[HEADER.size : HEADER.size + length])
    events = np.frombuffer(data, EVENT_DTYPE, count=used, offset=header)
    if written > capacity:  # the oldest event stands where the next one would have gone
        events = np.roll(events, -int(written % capacity))
    whole = events["end"] > 0
    return Record(meta, events if whole.all() else events[whole], max(0, written - capacity), cost)
