"""The kernel's page cache: query how much of a file is cached, and drop it from the cache."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

# File systems with a separate cache, which cannot be queried or dropped from outside.
OWN_CACHE = ("gpfs", "zfs", "fuse", "pvfs2", "beegfs", "9p", "wekafs")


def drop_from_cache(file: int) -> None:
    """Ask the kernel to drop a file's pages from the page cache; dirty pages stay.

    ``file`` is a file descriptor.
    """
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def resident_share(file: int) -> float | None:
    """Return the fraction of a file that is in the page cache; None if unknown."""
    size = os.fstat(file).st_size
    if not size:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    start = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
    if start in (None, ctypes.c_void_p(-1).value):
        return None
    try:
        pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        found = (ctypes.c_ubyte * pages)()
        if libc.mincore(start, size, found) != 0:
            return None
        return sum(bytes(found).translate(_LOWEST_BIT)) / pages
    finally:
        libc.munmap(start, size)


_LOWEST_BIT = bytes(byte & 1 for byte in range(256))


def flush_page(folder: int) -> None:
    """Write all dirty pages of a file system to disk.

    ``folder`` is a file descriptor of a folder or file on it.
    """
    if ctypes.CDLL(None, use_errno=True).syncfs(folder) != 0:
        os.sync()


def drop_files(paths: Iterable[Path]) -> float | None:
    """Drop files from the page cache; return the fraction of their bytes that stays cached.

    None if the fraction is unknown for all files.
    """
    size = kept = 0.0
    synced: set[int] = set()
    for path in paths:
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_dev not in synced:  # dirty pages can't be dropped
                    flush_page(file.fileno())
                    synced.add(status.st_dev)
                drop_from_cache(file.fileno())
                share = resident_share(file.fileno())
        except OSError:  # the file was removed, or is not readable for this user
            continue
        if share is not None:
            size += status.st_size
            kept += share * status.st_size
    return kept / size if size else None
