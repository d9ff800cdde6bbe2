"""The record file of a rank, memory-mapped: a header, then fixed-size events in a ring buffer.

Writing an event is one ``struct.pack_into`` on mapped memory. It needs no system call, and the data
survives ``kill -9``. docs/reference/formats/record-format.md describes the layout;
``analyze.records.read_record`` reads it.
"""

import json
import mmap
import os
import struct
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...security.files import open_regular
from .states import BACKGROUND_STATES, State

MAGIC = b"PACELINE"
VERSION = 8
HEADER_BYTES = 16384
# States of the training thread at whose beginning and end its run delay is read.
_READING_STATES = (
    *(State.INPUT, State.FORWARD, State.BACKWARD, State.OPTIMIZER),
    *(State.CHECKPOINT, State.VALIDATION, State.BLOCKED),
)
_READS_AT_END = bytes(state in _READING_STATES for state in range(256))
# A synchronous collective has no event before its end.
_READS_AT_BEGIN = bytes(state in (*_READING_STATES, State.COLLECTIVE) for state in range(256))
# magic, version, header bytes, event bytes, capacity, events written so far, what recording has
# cost so far (ns), length of the JSON
HEADER = struct.Struct("<8sIIIQQQI")
COUNTER = struct.Struct("<Q")
WRITTEN_OFFSET = 28
COST_OFFSET = 36
# start, end (ns of CLOCK_MONOTONIC), amount, sequence number, step, group, state, op, peer
EVENT = struct.Struct("<qqqIIHBBi")
# The operation that began last, at the end of the header: start (ns), sequence number, step, group,
# state, op.
LAST_BEGUN = struct.Struct("<qIIHBB")
LAST_BEGUN_OFFSET = HEADER_BYTES - 64
BACKGROUND_BEGUN_OFFSET = HEADER_BYTES - 32  # the same of threads that do not train
DEFAULT_CAPACITY = 1 << 16
# Of the files beside a ring.
LINES_SUFFIX, PROFILE_SUFFIX, OPERATORS_SUFFIX = ".lines", ".profile", ".operators"
SIDECAR_SUFFIXES = (LINES_SUFFIX, PROFILE_SUFFIX, OPERATORS_SUFFIX)


def _no_reading(_: int) -> None:
    """Read no run delay, where no rank trains."""


class Ring:
    """The ring buffer of a rank's events; it keeps the newest ``capacity``.

    Args:
        place: The ring's file. With ``unnamed`` the folder for a file without a name, which no
            other process reads, and which disappears however this process ends.
        meta: The header's JSON.
        capacity: Number of events.
        unnamed: Whether the file has no name.

    Attributes:
        path: The ring's file, or None if it has no name.
    """

    def __init__(
        self,
        place: Path,
        meta: dict[str, Any],
        capacity: int = DEFAULT_CAPACITY,
        unnamed: bool = False,
    ) -> None:
        self.path = None if unnamed else place
        self.capacity = capacity
        size = HEADER_BYTES + capacity * EVENT.size
        fd = _create_unnamed(place) if unnamed else _create(place)
        try:
            # Reserve the space now: a full /dev/shm raises an error here, instead of a SIGBUS
            # later.
            os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        except OSError:
            if self.path is not None:
                self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        self._next = count()
        self.describe(meta)

    def describe(self, meta: dict[str, Any]) -> None:
        """Write the header with ``meta`` as its JSON; the counters do not change."""
        text = json.dumps(meta).encode()
        if HEADER.size + len(text) > LAST_BEGUN_OFFSET:
            limit = LAST_BEGUN_OFFSET - HEADER.size
            raise ValueError(f"the record's header takes {len(text)} bytes; the limit is {limit}")
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
        """Append one event. Thread-safe: slots are assigned atomically."""
        self.writer(SimpleNamespace(step=step))(state, start, end, amount, seq, group, op, peer)

    def writer(
        self, of: Any, read_core_wait: Callable[[int], None] = _no_reading
    ) -> Callable[..., None]:
        """Return a function that appends an event with the current step of ``of``, a recorder.

        ``read_core_wait`` is called with the time at which a state of the training thread ends.
        """
        reads = _READS_AT_END
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
            if reads[state]:
                read_core_wait(end)

        return event

    def begin_writer(
        self, of: Any, read_core_wait: Callable[[int], None] = _no_reading
    ) -> Callable[..., None]:
        """Return a function that writes the operation which the recorder ``of`` begins.

        It overwrites the previous one, of the training thread or of the other threads. Whether that
        has ended is in the events.

        ``read_core_wait`` is called with the time at which a state of the training thread begins.
        """
        reads = _READS_AT_BEGIN
        pack, memory, background = LAST_BEGUN.pack_into, self._map, int(min(BACKGROUND_STATES))

        def begin(state: int, since: int, seq: int = 0, group: int = 0, op: int = 0) -> None:
            place = LAST_BEGUN_OFFSET if state < background else BACKGROUND_BEGUN_OFFSET
            pack(memory, place, since, seq & 0xFFFFFFFF, of.step, group, state, op)
            if reads[state]:
                read_core_wait(since)

        return begin

    @property
    def written(self) -> int:
        """Number of events written, including overwritten ones."""
        return int(COUNTER.unpack_from(self._map, WRITTEN_OFFSET)[0])

    @property
    def cost_ns(self) -> int:
        """Cost of recording (ns), as last written."""
        return int(COUNTER.unpack_from(self._map, COST_OFFSET)[0])

    @cost_ns.setter
    def cost_ns(self, cost: int) -> None:
        COUNTER.pack_into(self._map, COST_OFFSET, cost)

    def clear(self) -> None:
        """Discard all events."""
        self._next = count()
        COUNTER.pack_into(self._map, WRITTEN_OFFSET, 0)
        for offset in (LAST_BEGUN_OFFSET, BACKGROUND_BEGUN_OFFSET):
            LAST_BEGUN.pack_into(self._map, offset, 0, 0, 0, 0, 0, 0)

    def snapshot(self) -> bytes:
        """Return the file's bytes without the unused slots."""
        return self._map[: HEADER_BYTES + min(self.written, self.capacity) * EVENT.size]


def _create(path: Path) -> int:
    path.unlink(missing_ok=True)  # never truncate a file that an ending rank may have mapped
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    return open_regular(path, flags, follow_links=False, owner=os.geteuid())


def _create_unnamed(folder: Path) -> int:
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())
