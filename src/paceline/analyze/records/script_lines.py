"""Read the texts beside a record: the script's sampled lines (rank-N.lines), and its command."""

from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from ...plurals import counted
from ...record.ring.header_schema import without_line_breaks
from ...security.files import InvalidFileError, read_regular
from ...security.schema import parse_json

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
