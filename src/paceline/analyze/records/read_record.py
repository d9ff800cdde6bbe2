"""Read a rank's record.

The layout is in docs/reference/formats/record-format.md; the writer is record.ring.
"""

import mmap
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ...record.ring.header_schema import MAX_TIME_NS, parse_header
from ...record.ring.ring import (
    BACKGROUND_BEGUN_OFFSET,
    EVENT,
    HEADER,
    HEADER_BYTES,
    LAST_BEGUN,
    LAST_BEGUN_OFFSET,
    MAGIC,
    VERSION,
)
from ...record.ring.states import BACKGROUND_STATES, Op, State
from ...security.files import InvalidFileError
from .rank_lines import RankLines

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

# Events outside of these limits are damaged. Sums of values within them fit 64 bits.
MAX_AMOUNT = 1 << 53  # bytes, samples
MAX_RUN_NS = 1 << 55  # 417 days on either side of a record's middle event


class NewerVersionError(InvalidFileError):
    """A record that was written by a newer version of Paceline."""


@dataclass(frozen=True)
class BegunOperation:
    """The operation that a rank began last.

    Attributes:
        since: When it began (ns, on the host's clock).
        seq: For a collective, its number in the group.
    """

    since: int
    seq: int
    step: int
    group: int
    state: int
    op: int


@dataclass(frozen=True)
class Record:
    """One rank's record: its metadata, and its events in the order in which they were written."""

    meta: dict[str, Any]
    events: npt.NDArray[Any]
    lost: int  # number of events that the ring has overwritten
    cost_ns: int  # time that recording took on this rank
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)  # lines of the script, by number
    profile: RankLines | None = None  # of a run of paceline diagnose
    pages: mmap.mmap | None = None  # the mapped file that holds the events
    damaged: int = 0  # number of implausible events, left out
    begun: BegunOperation | None = None  # None before format version 3
    # Of threads that do not train; None before format version 5
    begun_in_background: BegunOperation | None = None

    @property
    def rank(self) -> int:
        return int(self.meta["rank"])

    @property
    def host(self) -> str:
        return str(self.meta["host"])

    @cached_property
    def on_gpu(self) -> bool:
        """Whether the record has the kernels of a GPU."""
        return bool((self.states == State.KERNEL).any())

    @cached_property
    def communicates_on_gpu(self) -> bool:
        """Whether collectives are kernels. gloo exchanges a GPU's tensors on the host."""
        return self.on_gpu and bool((self.states == State.COMMUNICATION_KERNEL).any())

    @cached_property
    def states(self) -> npt.NDArray[np.uint8]:
        """The state of each event, contiguous in memory."""
        return np.ascontiguousarray(self.events["state"])

    def count(self, *states: int) -> int:
        """Return the number of events in these states."""
        return int(np.count_nonzero(_state_mask(states)[self.states]))

    def events_in(self, *states: int) -> npt.NDArray[Any]:
        """Return the events in these states."""
        index = np.flatnonzero(_state_mask(states)[self.states])
        rows = self.events[index] if len(index) else self.events[:0]
        if len(index) and self.pages is not None:  # release the file's pages until the next read
            self.pages.madvise(mmap.MADV_DONTNEED)
        return rows


def _state_mask(states: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Return for each of 256 state numbers whether it is one of these."""
    mask = np.zeros(256, bool)
    mask[list(states)] = True
    return mask


def used_bytes(data: bytes) -> int:
    """Return how many bytes of a ring file have been written to; the rest is empty."""
    _, _, header_bytes, event_bytes, capacity, written, _, _ = HEADER.unpack_from(data)
    return int(header_bytes + min(written, capacity) * event_bytes)


def parse_record(data: Any, name: str = "the record") -> Record:
    """Parse the bytes of a record, or a mapped file.

    Raises:
        NewerVersionError: The record was written by a newer version of Paceline.
        InvalidFileError: The data is no record, is cut off, or has a damaged header.
    """
    if len(data) < HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
        hint = "HINT: give a rank-N.ring file"
        raise InvalidFileError(name, f"is not a record of Paceline. {hint}")
    _, version, header_bytes, event_bytes, capacity, written, cost_ns, meta_bytes = (
        HEADER.unpack_from(data)
    )
    if version > VERSION:
        reason = (
            f"has version {version}, and this Paceline reads up to {VERSION}. HINT: update Paceline"
        )
        raise NewerVersionError(name, reason)
    used = min(written, capacity)
    if (
        header_bytes != HEADER_BYTES
        or event_bytes != EVENT.size
        or HEADER.size + meta_bytes > header_bytes
    ):
        raise InvalidFileError(name, "is damaged: the sizes in its header are wrong")
    if capacity < 1 or len(data) < header_bytes + used * event_bytes:
        raise InvalidFileError(name, f"is cut off or damaged ({len(data)} bytes)")
    meta = cast(
        dict[str, Any], parse_header(bytes(data[HEADER.size : HEADER.size + meta_bytes]), name)
    )
    _label_groups(meta)
    events = np.frombuffer(data, EVENT_DTYPE, count=used, offset=header_bytes)
    if written > capacity:  # the oldest event is where the next one would be written
        events = np.roll(events, -int(written % capacity))
    valid = _find_valid_events(events, meta)
    never_written = int((events["end"] == 0).sum())  # reserved by a writer that ended before
    damaged = len(events) - int(valid.sum()) - never_written
    events = events if valid.all() else events[valid]
    pages = data if isinstance(data, mmap.mmap) else None
    background_offset = BACKGROUND_BEGUN_OFFSET if version >= 5 else None
    return Record(
        *(meta, events, max(0, written - capacity), cost_ns),
        pages=pages,
        damaged=damaged,
        begun=_read_begun(data, LAST_BEGUN_OFFSET if version >= 3 else None),
        begun_in_background=_read_begun(data, background_offset),
    )


def _label_groups(meta: dict[str, Any]) -> None:
    """Name the process groups of a mesh by their axes: "tensor (data 0) #3"."""
    labels = meta.get("mesh", {}).get("groups", {})
    for group in meta.get("groups", {}).values():
        if label := labels.get(group["name"]):
            group["name"] = f"{label} #{group['name']}"


def _read_begun(data: Any, offset: int | None) -> BegunOperation | None:
    if offset is None:
        return None
    begun = BegunOperation(*LAST_BEGUN.unpack_from(data, offset))
    return begun if begun.since > 0 else None


def _find_valid_events(events: npt.NDArray[Any], meta: dict[str, Any]) -> npt.NDArray[np.bool_]:
    """Return which events are plausible; the others are damaged."""
    known_groups = np.zeros(1 << 16, bool)
    known_groups[[0, *map(int, meta.get("groups", {}))]] = True
    known_states = np.zeros(256, bool)
    known_states[list(State)] = True
    known_ops = np.zeros(256, bool)
    known_ops[[0, *Op]] = True
    valid = known_states[events["state"]] & known_groups[events["group"]] & known_ops[events["op"]]
    is_communication = events["state"] == State.BLOCKED
    for state in (State.COLLECTIVE, State.CALL, *BACKGROUND_STATES):
        is_communication |= events["state"] == state
    valid &= ~is_communication | ((events["group"] > 0) & (events["op"] > 0))
    start, end = events["start"], events["end"]
    valid &= (start >= 0) & (end > 0) & (end >= start) & (end < MAX_TIME_NS)
    valid &= (events["amount"] >= 0) & (events["amount"] < MAX_AMOUNT)
    if valid.any():
        median_end = int(np.median(end[valid]))
        valid &= (start > median_end - MAX_RUN_NS) & (end < median_end + MAX_RUN_NS)
    return np.asarray(valid)


# Places of the ranks along the axes of a mesh, for messages and labels


def mesh_places(records: Iterable[Record]) -> dict[int, dict[str, int]]:
    """Return the position of each rank along each axis; {} where samples are the only axis."""
    found = {}
    for record in records:
        mesh = record.meta.get("mesh")
        if mesh is not None and len(mesh["axes"]) > 1:
            names = [axis for axis, _ in mesh["axes"]]
            found[record.rank] = dict(zip(names, mesh["place"], strict=True))
    return found


def axes_of_groups(records: Iterable[Record]) -> dict[str, str]:
    """Return the axes of each process group of a mesh by its name: "tensor (data 0) #3"."""
    labels: dict[str, str] = {}
    for record in records:
        own = record.meta.get("mesh", {}).get("groups", {})
        labels |= {f"{label} #{name}": label.partition(" (")[0] for name, label in own.items()}
    return labels
