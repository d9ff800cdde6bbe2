"""A memory-mapped file a rank: a header, then fixed-size events in a ring.

Writing an event is one ``struct.pack_into`` on mapped memory: no system call, and what was
written is still there after ``kill -9``. docs/reference/record-format.md describes the layout;
``analyze.records.read_record`` is its reader.
"""

import json
import mmap
import os
import struct
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...security.files import open_regular

MAGIC = b"PACELINE"
VERSION = 4
HEADER_BYTES = 16384
# magic, version, header bytes, event bytes, capacity, events written so far, what recording has
# cost so far (ns), length of the JSON
HEADER = struct.Struct("<8sIIIQQQI")
COUNTER = struct.Struct("<Q")
WRITTEN_OFFSET = 28
COST_OFFSET = 36
# start, end (ns of CLOCK_MONOTONIC), amount, sequence number, step, group, state, op, peer
EVENT = struct.Struct("<qqqIIHBBi")
# What the rank has begun last, at the header's end: since when (ns), sequence number, step, group,
# state, op.
LAST_BEGUN = struct.Struct("<qIIHBB")
LAST_BEGUN_OFFSET = HEADER_BYTES - 64
DEFAULT_CAPACITY = 1 << 16


class Ring:
    """Writes events of one rank into ``path``; the newest ``capacity`` of them are kept."""

    def __init__(self, path: Path, meta: dict[str, Any], capacity: int = DEFAULT_CAPACITY) -> None:
        self.path = path
        self.capacity = capacity
        size = HEADER_BYTES + capacity * EVENT.size
        path.unlink(missing_ok=True)  # never truncate what a dying rank may still have mapped
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        fd = open_regular(path, flags, follow_links=False, owner=os.geteuid())
        try:
            # Reserve the space now: a full /dev/shm is an error here and not a SIGBUS later.
            os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._next = count()
        self.describe(meta)

    def describe(self, meta: dict[str, Any]) -> None:
        """Write the header with ``meta`` as its JSON; the counters stay."""
        text = json.dumps(meta).encode()
        if HEADER.size + len(text) > LAST_BEGUN_OFFSET:
            raise ValueError(f"the record's description takes {len(text)} bytes, over its header's")
        HEADER.pack_into(
            *(self._map, 0, MAGIC, VERSION, HEADER_BYTES, EVENT.size, self.capacity),
            *(self.written, self.cost_ns, len(text)),
        )
        self._map[HEADER.size : HEADER.size + len(text)] = text

    def write(
        self,
        start: int,
        end: int,
        state: int,
        amount: int = 0,
        seq: int = 0,
        step: int = 0,
        group: int = 0,
        op: int = 0,
        peer: int = -1,
    ) -> None:
        """Append one event. Safe from several threads: a slot is taken atomically."""
        self.writer(SimpleNamespace(step=step))(state, start, end, amount, seq, group, op, peer)

    def writer(self, of: Any) -> Callable[..., None]:
        """``write`` for a recorder, whose ``step`` goes into every event: one call, no more."""
        ring, pack, count_to = self, EVENT.pack_into, COUNTER.pack_into
        memory, capacity, size = self._map, self.capacity, EVENT.size

        def event(
            state: int,
            start: int,
            end: int,
            amount: int = 0,
            seq: int = 0,
            group: int = 0,
            op: int = 0,
            peer: int = -1,
        ) -> None:
            slot = next(ring._next)
            place = HEADER_BYTES + slot % capacity * size
            number = seq & 0xFFFFFFFF
            pack(memory, place, start, end, amount, number, of.step, group, state, op, peer)
            count_to(memory, WRITTEN_OFFSET, slot + 1)

        return event

    def begin_writer(self, of: Any) -> Callable[..., None]:
        """For a recorder: says what the rank begins, over what it began before. Whether that has
        ended is in the events."""
        pack, memory = LAST_BEGUN.pack_into, self._map

        def begin(state: int, since: int, seq: int = 0, group: int = 0, op: int = 0) -> None:
            pack(memory, LAST_BEGUN_OFFSET, since, seq & 0xFFFFFFFF, of.step, group, state, op)

        return begin

    @property
    def written(self) -> int:
        """Events written so far, those that were overwritten included."""
        return int(COUNTER.unpack_from(self._map, WRITTEN_OFFSET)[0])

    @property
    def cost_ns(self) -> int:
        """What recording has cost this rank, as last told."""
        return int(COUNTER.unpack_from(self._map, COST_OFFSET)[0])

    @cost_ns.setter
    def cost_ns(self, cost: int) -> None:
        COUNTER.pack_into(self._map, COST_OFFSET, cost)

    def clear(self) -> None:
        """Forget all events."""
        self._next = count()
        COUNTER.pack_into(self._map, WRITTEN_OFFSET, 0)
        LAST_BEGUN.pack_into(self._map, LAST_BEGUN_OFFSET, 0, 0, 0, 0, 0, 0)

    def snapshot(self) -> bytes:
        """The file's bytes, without the slots that were never used."""
        return self._map[: HEADER_BYTES + min(self.written, self.capacity) * EVENT.size]

    def unlink(self) -> None:
        """Remove the file's name; the mapping goes on to work."""
        self.path.unlink(missing_ok=True)
