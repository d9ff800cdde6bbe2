"""Texts beside a record: the script's lines that samples found (rank-N.lines), and its command."""

from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from ...record.ring.header_schema import without_line_breaks
from ...security.files import InvalidFileError, read_regular
from ...security.schema import parse_json

MAX_LINES_BYTES = 16 << 20
MAX_LINES = 1 << 16  # different lines of a script
MAX_WORDS = 1 << 14  # of a command line

LineNumber = Annotated[int, Meta(ge=0, lt=1 << 53)]


class ScriptLine(TypedDict):
    """One line of a script. inside: module.function of the library that it had called."""

    number: LineNumber
    file: NotRequired[str]
    line: NotRequired[LineNumber]
    function: NotRequired[str]
    inside: NotRequired[str | None]
    code: NotRequired[str]


def read_lines(path: Path) -> tuple[dict[int, dict[str, Any]], str]:
    """Return the lines of a ``.lines`` file by their numbers, and a note on those left out.

    The last line is left out without a note: the rank may have been killed while it wrote it.

    Raises:
        InvalidFileError: The file is too large.
        OSError: The file can't be opened.
    """
    found: dict[int, dict[str, Any]] = {}
    *texts, last = read_regular(path, MAX_LINES_BYTES).split(b"\n")
    bad = max(len(texts) - MAX_LINES, 0)
    for text in texts[:MAX_LINES]:
        try:
            line: Any = without_line_breaks(parse_json(text, ScriptLine, path))
            found[line["number"]] = line
        except InvalidFileError:
            bad += 1
    try:
        line = without_line_breaks(parse_json(last, ScriptLine, path))
        found[line["number"]] = line
    except InvalidFileError:
        pass
    return found, f"{path}: {bad:,} of {len(texts):,} lines can't be read" if bad else ""


def words_of(command: object) -> list[str]:
    """Return the words of a job's command line; empty where ``command`` is no list."""
    if not isinstance(command, list | tuple):
        return []
    return [without_line_breaks(str(word)) for word in command[:MAX_WORDS]]
