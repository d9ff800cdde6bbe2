"""Stacks as faulthandler writes them, and where in them the script stands."""

import re
from dataclasses import dataclass
from pathlib import Path

from ...record.ring.stack_sampler import LIBRARY_PREFIXES
from ...security.files import read_regular
from ...security.text import printable

MAX_STACK_CHARS = 1 << 20
MAX_SOURCE_BYTES = 16 << 20
MAX_CODE_CHARS = 200  # of a line that is quoted

# In place of a stack.
FORBIDDEN = "its stack could not be read: not permitted"
_BLOCK = re.compile(r"^(?:Current thread|Thread) ", re.M)
_LINE = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.M)


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def of_script(self) -> bool:
        """Whether it is the user's own: of no library that is installed, and not Paceline's."""
        return not self.file.startswith(LIBRARY_PREFIXES)

    def __str__(self) -> str:
        """The place, and its line of code where the file can be read."""
        place = f"{Path(self.file).name}:{self.line} in {self.function}"
        code = _line_of(self.file, self.line)
        return printable(f"{place}: {code}" if code else place)


def main_thread(text: str) -> list[Frame]:
    """The frames of the main thread, the innermost first: faulthandler writes it last."""
    text = text[-MAX_STACK_CHARS:]
    starts = [match.start() for match in _BLOCK.finditer(text)]
    block = text[starts[-1] :] if starts else ""
    return [
        Frame(match["file"], int(match["line"][:9]), match["function"])
        for match in _LINE.finditer(block)
    ]


def own_line(text: str) -> Frame | None:
    """The innermost frame of the main thread that is the script's own, else its innermost."""
    frames = main_thread(text)
    return next((frame for frame in frames if frame.of_script), frames[0] if frames else None)


def _line_of(file: str, number: int) -> str:
    """Return a line of a source file; "" where it can't be read."""
    try:
        lines = read_regular(file, MAX_SOURCE_BYTES).splitlines()
    except (OSError, ValueError):  # too large; a name with a NUL
        return ""
    line = lines[number - 1] if 0 < number <= len(lines) else b""
    return line.decode(errors="replace").strip()[:MAX_CODE_CHARS]
