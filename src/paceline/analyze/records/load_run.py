"""A run's folder, as ``paceline run --record`` leaves it, as records."""

import mmap
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...record.ring.header_schema import without_line_breaks
from ...record.ring.tail import MAX_RECORD_BYTES
from ...security.error_reason import reason_of
from ...security.files import InvalidFileError, open_regular
from ...security.schema import read_json
from .read_record import NewerVersionError, Record, read
from .script_lines import read_lines, words_of

MAX_RECORDS = 1 << 13  # of one folder; every pair of ranks has a number in the report
MAX_RUN_JSON_BYTES = 16 << 20
MAX_NAMED = 8  # files that an error message lists


@dataclass(frozen=True)
class Run:
    """The records of one run's ranks, and what could not be read."""

    name: str
    records: list[Record]
    missing: list[int]  # ranks without a record
    refused: list[str] = field(default_factory=list)  # files that are no record, and why
    command: list[str] = field(default_factory=list)
    running: bool = False  # the job goes on: this is of it so far


def load(folder: Path) -> Run:
    """Read every rank's record in ``folder``.

    Raises ValueError where there is none, where two runs are mixed, or where a file is of a
    newer version; a damaged file is left out, and named in ``refused``.
    """
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {what}. HINT: the folder given to paceline run --record")
    paths = sorted(folder.glob("*.ring"), key=lambda path: (len(path.name), path.name))
    if not paths:
        inside = sorted({path.parent for path in folder.rglob("*.ring")})
        hint = f"{inside[0]} has one" if inside else "paceline run --record makes one"
        raise ValueError(f"{folder} has no record (rank-N.ring). HINT: {hint}")
    if len(paths) > MAX_RECORDS:
        raise ValueError(
            f"{folder} has {len(paths):,} records; at most {MAX_RECORDS:,} are read at once. "
            "HINT: a folder with the records of one run"
        )
    records, refused = [], []
    for path in paths:
        try:
            record, notes = _read(path)
        except NewerVersionError:
            raise
        except (InvalidFileError, OSError) as error:
            refused.append(without_line_breaks(f"{path}: {reason_of(error)}"))
            continue
        records.append(record)
        refused += notes
    if not records:
        raise ValueError(f"{folder}: no file can be read: {'; '.join(refused[:MAX_NAMED])}")
    _one_run(folder, records)
    records.sort(key=lambda record: record.rank)
    size = max(int(record.meta["size"]) for record in records)
    missing = sorted(set(range(size)) - {record.rank for record in records})
    return Run(str(folder), records, missing, refused, _command(folder))


def read_file(path: Path) -> Record:
    """Return the record in a file, which stays mapped.

    Raises:
        InvalidFileError: It is no record.
        OSError: It can't be opened, or is no regular file.
    """
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > MAX_RECORD_BYTES:
            reason = f"has {size:,} bytes, and a record at most {MAX_RECORD_BYTES:,}"
            raise InvalidFileError(path, reason)
        data: Any = mmap.mmap(fd, 0, access=mmap.ACCESS_READ) if size else b""
    finally:
        os.close(fd)
    return read(data, str(path))


def _read(path: Path) -> tuple[Record, list[str]]:
    """Return a rank's record with the script's lines, and which of its files was left out."""
    record = read_file(path)
    lines = path.with_suffix(".lines")
    try:
        by_number, note = read_lines(lines)
    except FileNotFoundError:
        return record, []
    except (InvalidFileError, OSError) as error:
        return record, [without_line_breaks(f"{lines}: {reason_of(error)}")]
    return replace(record, lines=by_number), [without_line_breaks(note)] if note else []


def _one_run(folder: Path, records: list[Record]) -> None:
    runs: dict[tuple[str, int], list[int]] = {}
    for record in records:
        key = (str(record.meta.get("run", "")), int(record.meta["size"]))
        runs.setdefault(key, []).append(record.rank)
    if len(runs) > 1:
        told = "; ".join(
            f"rank {', '.join(map(str, sorted(ranks)[:4]))}{' ...' if len(ranks) > 4 else ''} of "
            f"{run or 'an unnamed run'} with {size} ranks"
            for (run, size), ranks in runs.items()
        )
        raise ValueError(
            f"{folder} has records of {len(runs)} different runs ({told}). HINT: one folder a run"
        )
    ranks = [record.rank for record in records]
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        raise ValueError(f"{folder} has two records of rank {twice}. HINT: one folder a run")


def _command(folder: Path) -> list[str]:
    try:
        about = read_json(folder / "run.json", dict[str, Any], MAX_RUN_JSON_BYTES)
    except (OSError, InvalidFileError):
        return []
    return words_of(about.get("command"))
