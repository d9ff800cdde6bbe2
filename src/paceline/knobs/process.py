"""Knobs of a rank's process: its threads, its CPU binding, its memory allocator, and NCCL."""

import ctypes
import ctypes.util
import functools
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..cluster.schedulers.env_numbers import THREAD_VARIABLES
from ..record.hooks.import_hooks import after_import
from ..record.hooks.taps import NEW_GROUP
from .knob import KnobResult

# Parameters of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT = 1 << 30  # bytes of freed memory that are kept; only larger blocks use mmap
RETURNED = 128 << 10  # bytes of a block that uses mmap: glibc's default at the start of a process
# Do not return freed memory to the system, including large blocks: by default jemalloc returns
# blocks of 8 MiB or more at once (jemalloc's manual, opt.oversize_threshold, opt.dirty_decay_ms).
OF_JEMALLOC = "oversize_threshold:1,dirty_decay_ms:-1,muzzy_decay_ms:-1"
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_keeps_memory = False  # whether the knob keep-memory is on


def environment(settings: Iterable[str]) -> dict[str, str]:
    """Return the environment variables with which a rank must be started for these knobs."""
    found = {}
    if "huge-pages" in settings:
        found["THP_MEM_ALLOC_ENABLE"] = "1"  # for torch's tensors of 2 MiB or more
    if "jemalloc" in settings and (library := _jemalloc()):
        before = os.environ.get("LD_PRELOAD")
        found["LD_PRELOAD"] = f"{library}:{before}" if before else library
        found["MALLOC_CONF"] = os.environ.get("MALLOC_CONF") or OF_JEMALLOC
    return found


@functools.cache
def _jemalloc() -> str:
    """Return the jemalloc library of the Python environment (conda) or of the system, or ""."""
    here = Path(sys.prefix) / "lib" / "libjemalloc.so.2"
    return str(here) if here.exists() else ctypes.util.find_library("jemalloc") or ""


def threads(count: int, turned: KnobResult) -> None:
    """Set the number of threads, and ignore the script's own setting."""
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(count)))

    def install(torch: Any) -> None:
        torch.set_num_threads(count)
        turned.done()
        turned.passes_over(torch, "set_num_threads")

    after_import({"torch": install})


def unbound(_: bool, turned: KnobResult) -> None:
    """Ignore the script's CPU binding of its own process and of processes that it starts."""

    def passed_over(*_: Any) -> None:
        turned.overrides("os.sched_setaffinity")
        turned.done()

    os.sched_setaffinity = passed_over


def kept(_: bool, turned: KnobResult) -> None:
    global _keeps_memory
    problem = _set_malloc({M_MMAP_THRESHOLD: KEPT, M_TRIM_THRESHOLD: KEPT, M_TOP_PAD: 1 << 26})
    if problem:
        turned.not_done(problem)
        return
    _keeps_memory = True
    turned.done()


def return_freed_memory() -> bool:
    """Let glibc return freed blocks to the system at once; return whether it does.

    By default glibc returns only blocks that are larger than any that was freed before (up to
    32 MiB). The knob keep-memory and settings of the user's environment remain.
    """
    set_by_user = [n for n in os.environ if n.startswith("MALLOC_") and n.endswith("_THRESHOLD_")]
    if _keeps_memory or set_by_user or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    return not _set_malloc({M_MMAP_THRESHOLD: RETURNED, M_TRIM_THRESHOLD: RETURNED})


def _set_malloc(values: dict[int, int]) -> str:
    """Set parameters of glibc's malloc; return why that is not possible, or ""."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return "this C library has no mallopt (glibc has)"
    for name, value in values.items():
        if not mallopt(name, value):
            return f"this C library refuses mallopt({name}, {value})"
    return ""


def jemalloc(_: bool, turned: KnobResult) -> None:
    """Report whether jemalloc is loaded; the launcher preloads it (``environment``)."""
    if hasattr(ctypes.CDLL(None), "mallctl"):
        turned.done()
    else:
        turned.not_done(
            "there is no libjemalloc.so.2. HINT: install jemalloc with apt or conda or as a module"
        )


def huge_pages(_: bool, turned: KnobResult) -> None:
    """Report whether huge pages are available.

    torch requests them if its environment variable is set (``environment``).
    """
    try:
        mode = HUGE_PAGES.read_text()
    except OSError:
        mode = "[never]"
    if "[never]" in mode:
        turned.not_done(f"the kernel has them disabled ({HUGE_PAGES})")
    elif "[always]" in mode:
        turned.not_done("the kernel already uses them for all memory")
    else:
        turned.done()


def nccl(variable: str, value: str | int, turned: KnobResult) -> None:
    """Set an environment variable that NCCL reads when it creates a communicator.

    The variables are documented in NCCL's manual, "Environment Variables". Paceline tries each one
    in a separate run (paceline diagnose --try) and never in a training job: NCCL aborts the
    communicator if it does not support an algorithm or a protocol on these GPUs. The result is
    reported after the script creates a process group.
    """
    os.environ[variable] = str(value)

    def report(
        _: Any, size: int, rank: int, members: list[int], *args: Any, **options: Any
    ) -> None:
        if _is_nccl(str(args[0] if args else options.get("backend", "")).lower()):
            turned.done()
        elif not turned.set:
            turned.not_done("the script does not use NCCL")

    NEW_GROUP.after(report)


def _is_nccl(backend: str) -> bool:
    """Return whether a group uses NCCL.

    torch selects it for GPUs if no backend is named, and so does the backend "paceline".
    """
    import torch

    named = "nccl" in backend or backend in ("", "none", "undefined", "paceline")
    return named and torch.cuda.is_available()
