"""Stacks as faulthandler writes them, and where in them the script stands."""

import linecache
import re
from dataclasses import dataclass
from pathlib import Path

from ..record.sampler import LIBRARIES

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
        return not self.file.startswith(LIBRARIES)

    def __str__(self) -> str:
        """The place, and its line of code where the file can be read."""
        code = linecache.getline(self.file, self.line).strip()
        place = f"{Path(self.file).name}:{self.line} in {self.function}"
        return f"{place}: {code}" if code else place


def main_thread(text: str) -> list[Frame]:
    """The frames of the main thread, the innermost first: faulthandler writes it last."""
    starts = [match.start() for match in _BLOCK.finditer(text)]
    block = text[starts[-1] :] if starts else ""
    return [
        Frame(match["file"], int(match["line"]), match["function"])
        for match in _LINE.finditer(block)
    ]


def own_line(text: str) -> Frame | None:
    """The innermost frame of the main thread that is the script's own, else its innermost."""
    frames = main_thread(text)
    return next((frame for frame in frames if frame.of_script), frames[0] if frames else None)
