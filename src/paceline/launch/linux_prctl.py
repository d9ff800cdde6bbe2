"""Process attributes that the launcher sets by prctl(2) of Linux, called through ctypes."""

import ctypes

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG: the signal that this process gets when its parent ends
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphaned descendants become children of this process


def prctl(option: int, value: int) -> None:
    """Call prctl(2). Do nothing on systems without it."""
    try:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except AttributeError:
        pass
