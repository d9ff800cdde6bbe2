"""A run's folder, as ``paceline run --record`` leaves it, as records."""

import json
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .read import Record, read


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
    records, refused = [], []
    for path in paths:
        try:
            records.append(_read(path))
        except ValueError as error:
            if "version" in str(error):
                raise
            refused.append(str(error))
    if not records:
        raise ValueError(f"{folder}: no file can be read: {'; '.join(refused)}")
    _one_run(folder, records)
    records.sort(key=lambda record: record.rank)
    size = max(int(record.meta["size"]) for record in records)
    missing = sorted(set(range(size)) - {record.rank for record in records})
    return Run(str(folder), records, missing, refused, _command(folder))


def _read(path: Path) -> Record:
    with path.open("rb") as file:
        try:
            data: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file
            data = b""
    record = read(data, str(path))
    lines = path.with_suffix(".lines")
    if lines.exists():
        for text in lines.read_text().splitlines():
            try:
                line = json.loads(text)
                record.lines[int(line["number"])] = line
            except (ValueError, KeyError):  # cut off in the middle of a line
                continue
    return record


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
        return [str(word) for word in json.loads((folder / "run.json").read_text())["command"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
