"""prctl(2) of Linux, by ctypes: what the launcher sets for a process and its children."""

import ctypes

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG: the signal that this process gets when its parent ends
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphaned descendants become children of this process


def prctl(option: int, value: int) -> None:
    """Call prctl(2). Does nothing on systems that do not have it."""
    try:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except AttributeError:
        pass
