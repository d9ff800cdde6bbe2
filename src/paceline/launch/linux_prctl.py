"""Process attributes that the launcher sets by prctl(2) of Linux, called through ctypes."""

import ctypes
import os
from pathlib import Path

SET_NAME = 15  # PR_SET_NAME: the name of the main thread, at most 15 bytes
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG: the signal that this process gets when its parent ends
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphaned descendants become children of this process


def prctl(option: int, value: int) -> None:
    """Call prctl(2). Do nothing on systems without it."""
    try:
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
    except AttributeError:
        pass


def set_title(title: str) -> None:
    """Show ``title`` as the command line of this process, in ps and top.

    It replaces the arguments in the memory of the process, and is cut to their length. Nothing is
    done on systems other than Linux.
    """
    text = os.fsencode(title).replace(b"\0", b" ")
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end of proc(5)
        shown = Path("/proc/self/cmdline").read_bytes()
        # the arguments may not be here: another process of a test or a tool has moved them
        if not start or ctypes.string_at(start, end - start) != shown:
            return
    except (OSError, ValueError, IndexError):
        return
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, min(len(text), end - start - 1))
    name = ctypes.create_string_buffer(text[:15])
    prctl(SET_NAME, ctypes.addressof(name))
