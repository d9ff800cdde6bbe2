"""Reading a record: the layout is in docs/reference/record-format.md, its writer is record.ring."""

import mmap
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ...record.ring.header_schema import MAX_TIME_NS, parse_header
from ...record.ring.ring import (
    EVENT,
    HEADER,
    HEADER_BYTES,
    LAST_BEGUN,
    LAST_BEGUN_OFFSET,
    MAGIC,
    VERSION,
)
from ...record.ring.states import Op, State
from ...security.files import InvalidFileError

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

# What lies outside of these can't be what it says; sums within them fit 64 bits.
MAX_AMOUNT = 1 << 53  # bytes, samples
MAX_RUN_NS = 1 << 55  # 417 days on either side of a record's middle event


class NewerVersionError(InvalidFileError):
    """A record that a newer Paceline wrote."""


@dataclass(frozen=True)
class Begun:
    """What a rank has begun last: since when (ns), and for a collective which."""

    since: int
    seq: int
    step: int
    group: int
    state: int
    op: int


@dataclass(frozen=True)
class Record:
    """One rank's record: what it says of itself, and its events in the order of writing."""

    meta: dict[str, Any]
    events: npt.NDArray[Any]
    lost: int  # events that the ring has overwritten
    cost_ns: int  # what recording has cost this rank
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)  # of the script, by number
    pages: mmap.mmap | None = None  # of the file that the events lie in
    damaged: int = 0  # events that can't be what they say, left out
    begun: Begun | None = None  # None before format version 3

    @property
    def rank(self) -> int:
        return int(self.meta["rank"])

    @property
    def host(self) -> str:
        return str(self.meta["host"])

    @cached_property
    def on_gpu(self) -> bool:
        """Whether it says what a GPU's kernels did."""
        return bool((self.states == State.KERNEL).any())

    @cached_property
    def states(self) -> npt.NDArray[np.uint8]:
        """The events' states, side by side in memory."""
        return np.ascontiguousarray(self.events["state"])

    def count(self, *states: int) -> int:
        """How many events of these states there are."""
        return int(np.count_nonzero(_one_of(states)[self.states]))

    def of(self, *states: int) -> npt.NDArray[Any]:
        """The events of these states."""
        at = np.flatnonzero(_one_of(states)[self.states])
        rows = self.events[at] if len(at) else self.events[:0]
        if len(at) and self.pages is not None:  # the file's pages go back until they are read again
            self.pages.madvise(mmap.MADV_DONTNEED)
        return rows


def _one_of(states: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """For each number of a state, whether it is one of these."""
    table = np.zeros(256, bool)
    table[list(states)] = True
    return table


def used_bytes(data: bytes) -> int:
    """How much of a ring's file has been written to; the rest holds nothing."""
    _, _, header, event, capacity, written, _, _ = HEADER.unpack_from(data)
    return int(header + min(written, capacity) * event)


def read(data: Any, name: str = "the record") -> Record:
    """Parse a record's bytes (or mapped file).

    Raises:
        NewerVersionError: A newer Paceline wrote it.
        InvalidFileError: It is no record, cut off, or its header is damaged.
    """
    if len(data) < HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
        hint = "HINT: a rank-N.ring file"
        raise InvalidFileError(name, f"is not a record of Paceline. {hint}")
    _, version, header, event, capacity, written, cost, length = HEADER.unpack_from(data)
    if version > VERSION:
        reason = f"has version {version}, this Paceline reads up to {VERSION}. HINT: update it"
        raise NewerVersionError(name, reason)
    used = min(written, capacity)
    if header != HEADER_BYTES or event != EVENT.size or HEADER.size + length > header:
        raise InvalidFileError(name, "is damaged: the sizes in its header can't be right")
    if capacity < 1 or len(data) < header + used * event:
        raise InvalidFileError(name, f"is cut off or damaged ({len(data)} bytes)")
    meta = cast(dict[str, Any], parse_header(bytes(data[HEADER.size : HEADER.size + length]), name))
    events = np.frombuffer(data, EVENT_DTYPE, count=used, offset=header)
    if written > capacity:  # the oldest event stands where the next one would have gone
        events = np.roll(events, -int(written % capacity))
    whole = _whole(events, meta)
    never = int((events["end"] == 0).sum())  # taken, and not written any more
    damaged = len(events) - int(whole.sum()) - never
    events = events if whole.all() else events[whole]
    pages = data if isinstance(data, mmap.mmap) else None
    begun = Begun(*LAST_BEGUN.unpack_from(data, LAST_BEGUN_OFFSET)) if version >= 3 else None
    return Record(
        *(meta, events, max(0, written - capacity), cost),
        pages=pages,
        damaged=damaged,
        begun=begun if begun is not None and begun.since > 0 else None,
    )


def _whole(events: npt.NDArray[Any], meta: dict[str, Any]) -> npt.NDArray[np.bool_]:
    """Which events can be what they say."""
    groups = np.zeros(1 << 16, bool)
    groups[[0, *map(int, meta.get("groups", {}))]] = True
    known = np.zeros(256, bool)
    known[list(State)] = True
    operations = np.zeros(256, bool)
    operations[[0, *Op]] = True
    whole = known[events["state"]] & groups[events["group"]] & operations[events["op"]]
    talks = events["state"] == State.BLOCKED
    for state in (State.COLLECTIVE, State.CALL):
        talks |= events["state"] == state
    whole &= ~talks | ((events["group"] > 0) & (events["op"] > 0))
    start, end = events["start"], events["end"]
    whole &= (start >= 0) & (end > 0) & (end >= start) & (end < MAX_TIME_NS)
    whole &= (events["amount"] >= 0) & (events["amount"] < MAX_AMOUNT)
    if whole.any():
        middle = int(np.median(end[whole]))
        whole &= (start > middle - MAX_RUN_NS) & (end < middle + MAX_RUN_NS)
    return np.asarray(whole)
