"""Find the loops of the script that run now, and what shuffles in them."""

import ast
import sys
from collections.abc import Iterator
from types import FrameType

from ..expressions import parsed
from ..user_lines import is_users_file, place
from .sampler_lines import SHUFFLES


def shuffle_line() -> str:
    """Return the line that shuffles in a loop which runs now; "" if there is none.

    The loops are those of the script's functions on this thread's stack.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users_file(file):
            for loop in _loops_around(frame):
                calls = [one for one in ast.walk(loop) if isinstance(one, ast.Call)]
                found = [c for c in calls if ast.unparse(c.func).rpartition(".")[2] in SHUFFLES]
                if found:
                    return place(file, found[0].lineno)
        frame = frame.f_back
    return ""


def loop_line() -> str:
    """Return the line of the innermost ``for`` loop of the script that runs now; "" without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users_file(file):
            for loop in _loops_around(frame):
                return place(file, loop.lineno)
        frame = frame.f_back
    return ""


def _loops_around(frame: FrameType) -> Iterator[ast.For]:
    """Yield the loops whose bodies a frame runs, the innermost first."""
    tree = parsed(frame.f_code.co_filename)
    if tree is None:
        return
    line, first = frame.f_lineno, frame.f_code.co_firstlineno
    found = [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.For)
        and first <= one.lineno
        and one.body[0].lineno <= line <= (one.body[-1].end_lineno or 0)
    ]
    yield from sorted(found, key=lambda one: -one.lineno)
