"""Line numbers of frames that are in the middle of an instruction."""

import dis
from functools import lru_cache
from types import CodeType, FrameType


def frame_line(frame: FrameType) -> int:
    """Return the line that ``frame`` executes, see ``code_line``."""
    return code_line(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=4096)
def code_line(code: CodeType, offset: int) -> int:
    """Return the line of the instruction at ``offset``.

    The jump to a loop's next iteration after an ``if`` that was false has no line (CPython 3.11),
    and is where a thread that computes in Python is mostly seen: there it gives up the
    interpreter's lock. Its line is that of the ``if``, from which it is reached. ``frame.f_lineno``
    is None there.
    """
    before = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= offset < end and number:
            return number
        if start <= offset:
            before = number or before
    for one in dis.get_instructions(code):
        if one.opcode in _JUMPS and one.argval == offset and one.positions:
            return one.positions.lineno or before
    return before


_JUMPS = frozenset(dis.hasjrel + dis.hasjabs)
