"""Parse the stacks that faulthandler writes, and find the script's line in them."""

import re
from dataclasses import dataclass
from pathlib import Path

from ...record.ring.stack_sampler import LIBRARY_PREFIXES
from ...security.files import read_regular
from ...security.text import printable

MAX_STACK_CHARS = 1 << 20
MAX_SOURCE_BYTES = 16 << 20
MAX_CODE_CHARS = 200  # of a quoted line of code

# Written in place of a stack.
STACK_NOT_PERMITTED = "its stack could not be read: not permitted"
_THREAD_HEADER = re.compile(r"^(?:Current thread|Thread) ", re.M)
_FRAME_LINE = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.M)


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def is_user_code(self) -> bool:
        """Whether the frame is in the user's code: in no installed library and not in Paceline."""
        return not self.file.startswith(LIBRARY_PREFIXES)

    def __str__(self) -> str:
        """Return the place, with its line of code where the file can be read."""
        place = f"{Path(self.file).name}:{self.line} in {self.function}"
        code = _source_line(self.file, self.line)
        return printable(f"{place}: {code}" if code else place)


def main_thread_frames(text: str) -> list[Frame]:
    """Return the main thread's frames, innermost first. faulthandler writes that thread last."""
    text = text[-MAX_STACK_CHARS:]
    starts = [match.start() for match in _THREAD_HEADER.finditer(text)]
    block = text[starts[-1] :] if starts else ""
    return [
        Frame(match["file"], int(match["line"][:9]), match["function"])
        for match in _FRAME_LINE.finditer(block)
    ]


def innermost_user_frame(text: str) -> Frame | None:
    """Return the main thread's innermost frame in the user's code, else its innermost frame."""
    frames = main_thread_frames(text)
    return next((frame for frame in frames if frame.is_user_code), frames[0] if frames else None)


def _source_line(file: str, number: int) -> str:
    """Return a line of a source file, or "" where it can't be read."""
    try:
        lines = read_regular(file, MAX_SOURCE_BYTES).splitlines()
    except (OSError, ValueError):  # too large; a name with a NUL
        return ""
    line = lines[number - 1] if 0 < number <= len(lines) else b""
    return line.decode(errors="replace").strip()[:MAX_CODE_CHARS]
