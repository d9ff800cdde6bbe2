"""Find how many epochs a script trains: the range of the loop around that over the loader."""

import ast
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ..expressions import UnknownValueError, parsed, value_of, variable
from ..user_lines import is_users_file, place
from .sampler_lines import SHUFFLES

_RANGES = ("range", "trange")
_LIGHTNING = "/pytorch/loops/fit_loop.py"
_WRAPPERS = ("tqdm", "tqdm.tqdm", "track")  # of a range


def epoch_in_loop() -> tuple[int, int]:
    """Return position and length of the innermost loop over a range that runs now.

    Such loops are those of the script's functions on this thread's stack, and Lightning's epochs.
    (-1, 0) if there is none, or its numbers are not known.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_LIGHTNING):
            return _position_in_lightning(frame)
        if is_users_file(frame.f_code.co_filename):
            for loop in _loops_around(frame):
                if (found := _position(loop, frame)) is not None:
                    return found
        frame = frame.f_back
    return -1, 0


def _position_in_lightning(frame: FrameType) -> tuple[int, int]:
    loop: Any = frame.f_locals.get("self")
    epochs, epoch = getattr(loop, "max_epochs", None), getattr(loop, "epoch_progress", None)
    if isinstance(epochs, int) and epochs > 0 and epoch is not None:
        return int(epoch.current.processed), epochs
    return -1, 0


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


def _position(loop: ast.For, frame: FrameType) -> tuple[int, int] | None:
    call = loop.iter
    if isinstance(call, ast.Call) and ast.unparse(call.func) in _WRAPPERS and call.args:
        call = call.args[0]
    is_range = isinstance(call, ast.Call) and ast.unparse(call.func) in _RANGES
    if not isinstance(call, ast.Call) or not is_range or not isinstance(loop.target, ast.Name):
        return None
    try:
        numbers = range(*(int(value_of(one, frame)) for one in call.args))
        return numbers.index(variable(loop.target.id, frame)), len(numbers)
    except (UnknownValueError, ValueError, TypeError):
        return None
