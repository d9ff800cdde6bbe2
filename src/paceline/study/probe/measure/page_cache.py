"""The system's cache of files: how much of one is in memory, and asking to forget it."""

import ctypes
import mmap
import os
from pathlib import Path

# File systems that have a cache of their own, which nobody outside can see or empty.
OWN_CACHE = ("gpfs", "zfs", "fuse", "pvfs2", "beegfs", "9p", "wekafs")
IN_MEMORY = ("tmpfs", "ramfs")


def forget(file: int) -> None:
    """Ask to drop a file's pages from memory; those that are not on the disk yet stay."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def resident(file: int) -> float | None:
    """The part of a file that is in memory; None where the system does not say."""
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


def flush(folder: int) -> None:
    """Write what waits to be written on the file system of an open folder."""
    if ctypes.CDLL(None, use_errno=True).syncfs(folder) != 0:
        os.sync()


def kind(folder: Path) -> str:
    """The type of a folder's file system, as the kernel lists it; "" where it does not."""
    real, best, found = os.path.realpath(folder), "", ""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4].encode().decode("unicode_escape")  # a space is \040
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # the last of several mounts covers the others
            best, found = point, after.split(" ")[0]
    return found
