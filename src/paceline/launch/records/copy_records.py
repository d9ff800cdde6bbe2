"""Copy the records of a job folder to the record folder: one record per rank and attempt."""

import os
import sys
from pathlib import Path
from typing import Any

from ...record.ring.states import SAMPLER_STATES
from ...record.ring.tail import MAX_RECORD_BYTES
from ...security.files import read_regular
from ...security.folders import Folder, open_subfolder, replace_file
from ...security.text import printable

FILES_BESIDE = (".lines", ".operators")  # suffixes of the files that a rank writes beside its ring


def copy_records(folder: Folder, target: Path, noted: int | None) -> None:
    """Copy the records of the last attempt to ``target``, those of earlier attempts to its
    subfolders ``attempt-N``.

    If the job continued without this node, ``target`` contains records of a later attempt. All
    records of this node then belong to earlier attempts.

    Args:
        folder: The job folder.
        target: The record folder.
        noted: Number of the attempt that began last on this node, or None if unknown.

    Raises:
        OSError, InvalidFileError: A record can't be read or written.
    """
    from ...analyze.records.read_record import parse_record, used_bytes

    found: dict[tuple[int, int], tuple[int, int, str, bytes]] = {}
    for name in folder.names():
        if not name.endswith(".ring"):
            continue
        path = folder.path / name
        try:
            data = folder.read(name, MAX_RECORD_BYTES)
        except OSError as error:
            sys.stderr.write(
                f"paceline: the record {printable(str(path))} was not copied: {error.strerror}\n"
            )
            continue
        try:
            record = parse_record(data, str(path))
            data = data[: used_bytes(data)]
        except ValueError as error:
            sys.stderr.write(
                f"paceline: {printable(str(error))}. Paceline copies the file unchanged\n"
            )
            replace_file(target / name, data)
            continue
        key = (int(record.meta.get("attempt", 0)), record.rank)
        told = _event_count(record)
        # A process that only started the ranks may have a record under a rank's number. The
        # record with more events is the rank's.
        if key not in found or told > found[key][0]:
            found[key] = (told, int(record.meta["size"]), name, data)
    sizes = {size for told, size, _, _ in found.values() if told}
    last = max([noted or 0, *(attempt for attempt, _ in found)])
    there = {target / f"rank-{rank}.ring" for rank in (0, *(rank for _, rank in found))}
    last = max([last, *map(_attempt, there)])
    for (attempt, rank), (told, size, name, data) in found.items():
        if not told and sizes and size not in sizes:
            continue
        place = target if attempt == last else target / f"attempt-{attempt}"
        stem = name.removesuffix(".ring")
        inside = open_subfolder(place) if place != target else None
        try:
            path = place if inside is None else Path()
            replace_file(path / f"rank-{rank}.ring", data, dir_fd=inside)
            for suffix in FILES_BESIDE:
                if folder.status(stem + suffix) is not None:
                    beside = folder.read(stem + suffix, MAX_RECORD_BYTES)
                    replace_file(path / f"rank-{rank}{suffix}", beside, dir_fd=inside)
        finally:
            if inside is not None:
                os.close(inside)


def _attempt(path: Path) -> int:
    """Return the attempt number of a record file; 0 if it is missing or invalid."""
    from ...analyze.records.read_record import parse_record

    try:
        return int(parse_record(read_regular(path, MAX_RECORD_BYTES)).meta.get("attempt", 0))
    except (OSError, ValueError):
        return 0


def _event_count(record: Any) -> int:
    """Return the number of events, without those of the sampler (where the script was)."""
    return int(len(record.events) - record.count(*SAMPLER_STATES))
