"""Huge pages for a process that forks often, on Linux 6.1 and newer.

A fork copies one entry for each page, and so does the end of the forked process.
"""

import ctypes
import mmap
from pathlib import Path

_COLLAPSE = 25  # MADV_COLLAPSE of madvise(2)
_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
MAX_HUGE_PAGE_BYTES = 16 << 20  # a larger one would take more memory than the fork saves time


def use_huge_pages() -> None:
    """Move the memory that this process has allocated to huge pages, as far as possible."""
    try:
        size = int(_SIZE_FILE.read_text())
        lines = Path("/proc/self/maps").read_text().splitlines()
    except (OSError, ValueError):
        return
    if not mmap.PAGESIZE < size <= MAX_HUGE_PAGE_BYTES:
        return
    madvise = ctypes.CDLL(None).madvise
    for line in lines:
        addresses, mode, *_, node, name = [*line.split(maxsplit=5), ""][:6]
        is_anonymous = name.startswith(("[heap]", "[anon")) or not name
        if mode != "rw-p" or node != "0" or not is_anonymous:
            continue
        first, end = (int(one, 16) for one in addresses.split("-"))
        first, end = -(-first // size) * size, end // size * size
        if first < end:
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _COLLAPSE)
