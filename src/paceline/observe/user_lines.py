"""The line of the user's code that runs, and whether it is a loop."""

import dis
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType

from ..record.hooks.error_messages import is_internal_file, is_library_file
from ..record.ring.stack_sampler import code_line

# Libraries that pass a loader's batches on. A loop over what they return is one over the loader.
_PASSING = ("/accelerate/data_loader.py", "/tqdm/", "/torch/utils/data/")
_COUNTING = "/paceline/data/"  # code of this package that needs all batches
# Code of libraries that ends its loop if a loader has fewer batches than its length.
_TOLERANT = (("/transformers/trainer.py", "get_batch_samples"),)
_LIGHTNING = (
    *("/lightning/pytorch/utilities/combined_loader.py",),
    *("/pytorch_lightning/utilities/combined_loader.py",),
)
_NEAR_FRAMES = 16
_LOOPS = ("FOR_ITER", "GET_ITER", "GET_YIELD_FROM_ITER", "SEND", "FOR_ITER_TUPLE")


def user_line() -> str:
    """Return the innermost line of the user's code on this thread's stack, "FILE:LINE".

    The file is relative to the working directory if it lies in it. "" if no line is known, as in a
    thread of autograd's engine.
    """
    return next(map(line_of, users_frames()), "")


def users_frames(frame: FrameType | None = None) -> Iterator[FrameType]:
    """Yield the frames of the user's code on this thread's stack, the innermost first.

    frame: The first one to look at; by default, the caller.
    """
    frame = frame or sys._getframe(1)
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def line_of(frame: FrameType) -> str:
    """Return the line that a frame executes, "FILE:LINE"."""
    return place(frame.f_code.co_filename, code_line(frame.f_code, frame.f_lasti))


@lru_cache(maxsize=4096)
def is_users_file(file: str) -> bool:
    """Return whether a file of Python code belongs to the user, and not to a library."""
    return not is_internal_file(file) and not is_library_file(file) and not _is_command(file)


def _is_command(file: str) -> bool:
    """Return whether a file is the program that has started this process."""
    return os.path.dirname(file) == os.path.dirname(sys.executable)


@lru_cache(maxsize=4096)
def place(file: str, line: int) -> str:
    """Return "FILE:LINE", with a file inside of the working directory relative to it."""
    path = os.path.abspath(file)
    relative = os.path.relpath(path)
    return f"{path if relative.startswith('..') else relative}:{line}"


def is_in_loop(frame: FrameType | None = None) -> bool:
    """Return whether the iterator that is made or advanced now is that of a ``for`` loop.

    Such a loop ends properly if the iterator ends early.

    Args:
        frame: Where to begin to look; by default, the caller.
    """
    frame = frame or sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if any(file.endswith(end) and frame.f_code.co_name == name for end, name in _TOLERANT):
            return True
        if file.endswith(_LIGHTNING) and frame.f_code.co_name == "__next__":
            # LightningEpochs tells its loop about the end; several loaders are repeated.
            return len(getattr(frame.f_locals.get("self"), "iterators", ())) == 1
        if is_internal_file(file) or any(part in file for part in _PASSING):
            if _COUNTING in file:
                return False
            if "/tqdm/" in file and _is_loop(frame.f_code, frame.f_lasti):
                return True
            frame = frame.f_back
            continue
        return _is_loop(frame.f_code, frame.f_lasti)
    return False


def is_read_ahead() -> bool:
    """Return whether a library fetches a batch that it passes on with the next fetch only."""
    return is_called_by("/accelerate/data_loader.py")


def is_called_by(file: str, function: str = "") -> bool:
    """Return whether a function of a file, or any, is among the last callers."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_NEAR_FRAMES):
        if frame is None:
            return False
        code = frame.f_code
        if code.co_filename.endswith(file) and function in ("", code.co_name):
            return True
        frame = frame.f_back
    return False


@lru_cache(maxsize=4096)
def _is_loop(code: CodeType, offset: int) -> bool:
    """Return whether the instruction is one of a loop, or calls what the next one iterates."""
    instructions = list(dis.get_instructions(code))
    at = next((i for i, one in enumerate(instructions) if one.offset == offset), None)
    if at is None:
        return False
    if instructions[at].opname in _LOOPS:
        return True
    after = instructions[at + 1 : at + 2]
    return instructions[at].opname.startswith("CALL") and bool(after) and after[0].opname in _LOOPS
