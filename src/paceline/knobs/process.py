"""Knobs of a rank's process: its threads, its cores, and what it does with freed memory."""

import ctypes
import ctypes.util
import functools
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..record.hooks.import_hooks import after_import
from .apply import Turned

# glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT = 1 << 30  # bytes: so much of freed memory is kept, and only larger pieces are mapped anew
# Nothing that is freed goes back, and large pieces are no exception: one that is 8 MiB or more is
# else given back at once (jemalloc's manual, opt.oversize_threshold and opt.dirty_decay_ms).
OF_JEMALLOC = "oversize_threshold:1,dirty_decay_ms:-1,muzzy_decay_ms:-1"
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def environment(settings: Iterable[str]) -> dict[str, str]:
    """Variables that a rank's process has to have from its very start for these knobs."""
    found = {}
    if "huge-pages" in settings:
        found["THP_MEM_ALLOC_ENABLE"] = "1"  # of torch's own tensors, from 2 MiB on
    if "jemalloc" in settings and (library := _jemalloc()):
        before = os.environ.get("LD_PRELOAD")
        found["LD_PRELOAD"] = f"{library}:{before}" if before else library
        found["MALLOC_CONF"] = os.environ.get("MALLOC_CONF") or OF_JEMALLOC
    return found


@functools.cache
def _jemalloc() -> str:
    """Beside this Python (conda), or where the linker looks."""
    here = Path(sys.prefix) / "lib" / "libjemalloc.so.2"
    return str(here) if here.exists() else ctypes.util.find_library("jemalloc") or ""


def threads(count: int, turned: Turned) -> None:
    """So many, and the script's own word is passed over."""
    os.environ["OMP_NUM_THREADS"] = str(count)

    def install(torch: Any) -> None:
        torch.set_num_threads(count)
        turned.done()
        turned.passes_over(torch, "set_num_threads")

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


def jemalloc(_: bool, turned: Turned) -> None:
    """The launcher has preloaded it (``environment``)."""
    if hasattr(ctypes.CDLL(None), "mallctl"):
        turned.done()
    else:
        turned.not_done("there is no libjemalloc.so.2. HINT: apt or conda install it, or a module")


def huge_pages(_: bool, turned: Turned) -> None:
    """torch asks for them where its variable is set (``environment``)."""
    try:
        mode = HUGE_PAGES.read_text()
    except OSError:
        mode = "[never]"
    if "[never]" in mode:
        turned.not_done(f"the kernel gives none ({HUGE_PAGES})")
    elif "[always]" in mode:
        turned.not_done("the kernel gives them to all already")
    else:
        turned.done()
