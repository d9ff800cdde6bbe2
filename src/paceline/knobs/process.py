"""Knobs of a rank's process: its threads, its cores, and what it does with freed memory."""

import ctypes
import functools
import os
from typing import Any

from ..record.imports import after_import
from .turned import Turned

# glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT = 1 << 30  # bytes: so much of freed memory is kept, and only larger pieces are mapped anew


def threads(count: int, turned: Turned) -> None:
    """So many, and the script's own word is passed over."""
    os.environ["OMP_NUM_THREADS"] = str(count)

    def install(torch: Any) -> None:
        torch.set_num_threads(count)
        turned.done()

        @functools.wraps(torch.set_num_threads)
        def passed_over(_: int) -> None:
            turned.overrides("torch.set_num_threads")

        torch.set_num_threads = passed_over

    after_import({"torch": install})


def unbound(_: bool, turned: Turned) -> None:
    """The script's own binding is passed over, for itself and for processes that it starts."""

    def passed_over(*_: Any) -> None:
        turned.overrides("os.sched_setaffinity")
        turned.done()

    os.sched_setaffinity = passed_over


def kept(_: bool, turned: Turned) -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        turned.not_done("this C library has no mallopt (glibc has)")
        return
    for name, value in ((M_MMAP_THRESHOLD, KEPT), (M_TRIM_THRESHOLD, KEPT), (M_TOP_PAD, 1 << 26)):
        if not mallopt(name, value):
            turned.not_done(f"this C library refuses mallopt({name}, {value})")
            return
    turned.done()
