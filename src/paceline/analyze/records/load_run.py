"""Load the records in a run's folder, as ``paceline run --record`` writes it."""

import mmap
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from ...plurals import counted, named_ranks
from ...record.ring.header_schema import without_line_breaks
from ...record.ring.ring import LINES_SUFFIX, PROFILE_SUFFIX
from ...record.ring.tail import MAX_RECORD_BYTES
from ...security.files import InvalidFileError, error_reason, open_regular, read_regular
from ...security.schema import parse_json, read_json
from .rank_lines import read_rank_lines
from .read_record import NewerVersionError, Record, parse_record

MAX_RECORDS = 1 << 13  # of one folder; the report has a figure for every pair of ranks
MAX_RUN_JSON_BYTES = 16 << 20
MAX_LISTED_FILES = 8  # files that an error message lists
SCALING_FILES = ("study.json", "critical-batch.json")  # in a folder of paceline scale
TUNING_SUFFIXES = (".toml", ".journal", ".trials")  # of the files and the folder of paceline tune


@dataclass(frozen=True)
class Run:
    """The records of one run's ranks, and what could not be read."""

    name: str
    records: list[Record]
    missing: list[int]  # ranks without a record
    refused: list[str] = field(default_factory=list)  # files that are not valid, with the reason
    command: list[str] = field(default_factory=list)
    running: bool = False  # the job is not finished; the records end now
    env: list[str] = field(default_factory=list)  # values of --env


def load_run(folder: Path) -> Run:
    """Load every rank's record in ``folder``.

    A damaged file is left out, and named in ``Run.refused``.

    Raises:
        ValueError: There is no record, the folder mixes two runs, or a file has a newer version.
    """
    if not folder.is_dir():
        problem = "is no folder" if folder.exists() else "does not exist"
        hint = _study_command(folder) or "give the folder of paceline run --record"
        raise ValueError(f"{folder} {problem}. HINT: {hint}")
    paths = sorted(folder.glob("*.ring"), key=lambda path: (len(path.name), path.name))
    if not paths:
        folders_with_records = sorted({path.parent for path in folder.rglob("*.ring")})
        hint = (
            f"give {folders_with_records[0]}, which has one"
            if folders_with_records
            else "paceline run --record FOLDER SCRIPT writes one"
        )
        if study := _study_command(folder):
            hint = f"{study} shows this study" + f"; or {hint}" * bool(folders_with_records)
        raise ValueError(f"{folder} has no record (rank-N.ring). HINT: {hint}")
    if len(paths) > MAX_RECORDS:
        raise ValueError(
            f"{folder} has {len(paths):,} records, and Paceline reads at most {MAX_RECORDS:,}. "
            "HINT: give a folder with the records of one run"
        )
    records, refused = [], []
    for path in paths:
        try:
            record, notes = _load_with_lines(path)
        except NewerVersionError:
            raise
        except (InvalidFileError, OSError) as error:
            refused.append(without_line_breaks(f"{path}: {error_reason(error)}"))
            continue
        records.append(record)
        refused += notes
    if not records:
        raise ValueError(
            f"{folder} has no readable record: {'; '.join(refused[:MAX_LISTED_FILES])}"
        )
    _check_one_run(folder, records)
    records.sort(key=lambda record: record.rank)
    size = max(int(record.meta["size"]) for record in records)
    missing = sorted(set(range(size)) - {record.rank for record in records})
    label = _read_label(folder)
    command, env = (command_words(label.get(name)) for name in ("command", "env"))
    return Run(str(folder), records, missing, refused, command=command, env=env)


def _study_command(path: Path) -> str:
    """Return the command that shows the study whose file or folder this is; "" if it is none."""
    if any((path / name).exists() for name in SCALING_FILES):
        return f"paceline scale --show {path}"
    files = [file for file in (path, *path.glob("*.journal")) if file.suffix in TUNING_SUFFIXES]
    for file in files:
        for stem in (file.stem, re.sub(r"-\d+$", "", file.stem)):  # of a fork: NAME-2.trials
            study = file.with_name(f"{stem}.toml")
            if study.exists() and study.with_suffix(".journal").exists():
                return f"paceline tune {study} --show"
    return ""


def load_record(path: Path) -> Record:
    """Return the record in a file, which stays mapped.

    Raises:
        InvalidFileError: The file is not a valid record.
        OSError: The file can't be opened, or is not a regular file.
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
    return parse_record(data, str(path))


def _load_with_lines(path: Path) -> tuple[Record, list[str]]:
    """Return a rank's record with the lines of its script, and notes on what was left out."""
    record, notes = load_record(path), []
    lines_path = path.with_suffix(LINES_SUFFIX)
    try:
        lines, note = read_lines(lines_path)
        record, notes = replace(record, lines=lines), [note] if note else []
    except FileNotFoundError:
        pass
    except (InvalidFileError, OSError) as error:
        notes = [f"{lines_path}: {error_reason(error)}"]
    profile_path = path.with_suffix(PROFILE_SUFFIX)
    try:
        record = replace(record, profile=read_rank_lines(profile_path))
    except FileNotFoundError:
        pass
    except (InvalidFileError, OSError) as error:
        notes.append(f"{profile_path}: {error_reason(error)}")
    return record, [without_line_breaks(note) for note in notes]


def _check_one_run(folder: Path, records: list[Record]) -> None:
    """Raise ValueError unless the records belong to one run and to different ranks."""
    ranks_of_run: dict[tuple[str, int], list[int]] = {}
    for record in records:
        key = (str(record.meta.get("run", "")), int(record.meta["size"]))
        ranks_of_run.setdefault(key, []).append(record.rank)
    if len(ranks_of_run) > 1:
        described = "; ".join(
            f"{named_ranks(ranks)} of {run or 'an unnamed run'} with {counted(size, 'rank')}"
            for (run, size), ranks in ranks_of_run.items()
        )
        raise ValueError(
            f"{folder} has records of {len(ranks_of_run)} different runs ({described}). "
            "HINT: record each run in a separate folder"
        )
    ranks = [record.rank for record in records]
    if len(set(ranks)) < len(ranks):
        duplicate = next(rank for rank in ranks if ranks.count(rank) > 1)
        raise ValueError(
            f"{folder} has two records of rank {duplicate}. "
            "HINT: record each run in a separate folder"
        )


def _read_label(folder: Path) -> dict[str, Any]:
    """Return what the launcher has written about the job; empty if it is missing or invalid."""
    try:
        return read_json(folder / "run.json", dict[str, Any], MAX_RUN_JSON_BYTES)
    except (OSError, InvalidFileError):
        return {}


# The texts beside a record: the script's sampled lines (rank-N.lines), and its command

MAX_LINES_BYTES = 16 << 20
MAX_LINES = 1 << 16  # distinct lines of a script
MAX_COMMAND_WORDS = 1 << 14

LineNumber = Annotated[int, Meta(ge=0, lt=1 << 53)]


class ScriptLine(TypedDict):
    """One line of a script. inside: module.function of the library that it called."""

    number: LineNumber
    file: NotRequired[str]
    line: NotRequired[LineNumber]
    function: NotRequired[str]
    inside: NotRequired[str | None]
    code: NotRequired[str]


def read_lines(path: Path) -> tuple[dict[int, dict[str, Any]], str]:
    """Return the lines of a ``.lines`` file by their numbers, and a note on invalid ones.

    An incomplete last line is left out without a note: the rank may have been killed while writing
    it.

    Raises:
        InvalidFileError: The file is too large.
        OSError: The file can't be opened.
    """
    lines: dict[int, dict[str, Any]] = {}
    *complete, last = read_regular(path, MAX_LINES_BYTES).split(b"\n")
    kept = complete[:MAX_LINES]
    invalid = len(complete) - len(kept)
    for number, text in enumerate((*kept, last)):
        try:
            line: Any = without_line_breaks(parse_json(text, ScriptLine, path))
            lines[line["number"]] = line
        except InvalidFileError:
            invalid += number < len(kept)
    of_all = f"{invalid:,} of {counted(len(complete), 'line')}"
    return lines, f"{path}: {of_all} can't be read" if invalid else ""


def command_words(command: object) -> list[str]:
    """Return the words of a job's command line; empty where ``command`` is not a list."""
    if not isinstance(command, list | tuple):
        return []
    return [without_line_breaks(str(word)) for word in command[:MAX_COMMAND_WORDS]]
