"""Read the newest events of records that are still being written.

A live view reads the header and the last events of a ring, never the whole file. The result has the
format of a small record. The rank is not involved.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ...security.files import InvalidFileError, open_regular
from ...security.processes import stat_fields
from .header_schema import RecordHeader, parse_header
from .ring import (
    COUNTER,
    EVENT,
    HEADER,
    HEADER_BYTES,
    LAST_BEGUN,
    LAST_BEGUN_OFFSET,
    MAGIC,
    VERSION,
    WRITTEN_OFFSET,
)
from .states import SAMPLER_STATES, State

MAX_CAPACITY = 1 << 20  # events of a ring, 16 times what a rank writes
MAX_RECORD_BYTES = HEADER_BYTES + MAX_CAPACITY * EVENT.size


@dataclass(frozen=True)
class Tail:
    """The end of one rank's record, and the state of its process when it was read.

    Attributes:
        now: The host's monotonic clock (ns), which is the clock of the events.
        process: The letter of the process state (``R``, ``S``, ``T`` for stopped, ...); "" if the
            process has ended, "?" if processes of ranks are not visible (in a container).
        data: The record.
        stack: The Python stack of the rank, if it was requested.
    """

    name: str
    now: int
    process: str
    data: bytes
    stack: str = ""


def read_tail(path: Path, most: int) -> bytes:
    """Return the last ``most`` events of a ring's file as a record.

    Raises:
        InvalidFileError: The file is not a record, or not yet.
        OSError: The file does not exist any more.
    """
    fd = open_regular(path)
    try:
        head = bytearray(os.pread(fd, HEADER_BYTES, 0))
        if len(head) < HEADER_BYTES or head[: len(MAGIC)] != MAGIC:
            raise InvalidFileError(path, "is not a record, or is not complete yet")
        magic, version, header, event, capacity, written, cost, length = HEADER.unpack_from(head)
        if version > VERSION or header != HEADER_BYTES or event != EVENT.size:
            return bytes(head)  # its reader reports the error
        if not 1 <= capacity <= MAX_CAPACITY or written >= 1 << 63:
            raise InvalidFileError(path, f"has a ring of {capacity} events, {written} written")
        first = written - min(written, most, capacity)
        events = b"".join(
            os.pread(fd, (stop - start) * event, header + start * event)
            for start, stop in _slot_ranges(first, written, capacity)
        )
        counter = os.pread(fd, COUNTER.size, WRITTEN_OFFSET)
    finally:
        os.close(fd)
    if len(counter) < COUNTER.size or len(events) < (written - first) * event:
        raise InvalidFileError(path, "is cut off")
    (written_since,) = COUNTER.unpack(counter)
    # Drop the events that the rank has overwritten meanwhile, or may be overwriting now.
    events = events[max(0, written_since + 1 - capacity - first) * event :]
    kept = len(events) // event
    HEADER.pack_into(head, 0, magic, version, header, event, max(kept, 1), kept, cost, length)
    return bytes(head) + events


def _slot_ranges(first: int, last: int, capacity: int) -> list[tuple[int, int]]:
    """Return the slots of the events from ``first`` up to ``last``: one range, or two."""
    if first == last:
        return []
    start, stop = first % capacity, (last - 1) % capacity + 1
    return [(start, stop)] if start < stop else [(start, capacity), (0, stop)]


def read_tails(folder: Path, most: int, attempt: int | None = None) -> list[Tail]:
    """Return the tails of all rings in a running job's folder, of one attempt or of all."""
    found = list(_iter_tails(folder, most, attempt))
    if any(tail.process for tail in found):
        return found
    # the job runs, so processes exist but are not visible
    return [replace(tail, process="?") for tail in found]


def _iter_tails(folder: Path, most: int, attempt: int | None) -> Iterator[Tail]:
    for path in sorted(folder.glob("*.ring")):
        try:
            data = read_tail(path, most)
            about = read_header(data)
        except (OSError, InvalidFileError):
            continue  # just made, or just removed
        if attempt is None or about.get("attempt", 0) == attempt:
            state = process_state(about["pid"]) if "pid" in about else ""
            yield Tail(path.name, time.monotonic_ns(), state, data)


_PROGRESS_EVENTS = 64  # newest events that are read


def read_progress(path: Path) -> tuple[bytes, int, int]:
    """Return the progress of a rank.

    It is the operation that began last (bytes as written), the end (ns) of the newest event that
    the stack sampler did not write (0: none of the last ones), and the number of steps.

    Raises:
        ValueError: The file is not a record, or not yet.
        OSError: The file does not exist any more.
    """
    record = read_tail(path, _PROGRESS_EVENTS)
    events = [EVENT.unpack_from(record, at) for at in range(HEADER_BYTES, len(record), EVENT.size)]
    operations = [event for event in events if event[6] not in SAMPLER_STATES]
    begun = record[LAST_BEGUN_OFFSET : LAST_BEGUN_OFFSET + LAST_BEGUN.size]
    steps = [event[4] + (event[6] == State.STEP) for event in events]
    return begun, max((event[1] for event in operations), default=0), max(steps, default=0)


def read_header(data: bytes, name: str = "the record") -> RecordHeader:
    """Return the checked header of a record. Raises InvalidFileError."""
    if len(data) < HEADER.size:
        raise InvalidFileError(name, "is cut off")
    length = HEADER.unpack_from(data)[-1]
    return parse_header(data[HEADER.size : HEADER.size + length], name)


def process_state(pid: int) -> str:
    """Return the letter of a process's state; "" if it has ended."""
    state = "".join(stat_fields(pid)[:1])
    return "" if state in ("Z", "X") else state
