"""Memory of large copies, and of mapped files.

The kernel clears each page when it is first written. For pages of 4 KiB that takes longer than the
copy itself; on a virtual machine several times as long.
"""

import contextlib
import ctypes
import mmap

import torch

PAGE_BYTES = mmap.PAGESIZE
MIN_POPULATED_BYTES = 1 << 20
_MADV_POPULATE_READ = 22  # of <sys/mman.h>


def map_memory(nbytes: int) -> mmap.mmap:
    """Return new memory that forked processes (of a DataLoader) do not share."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(advice)
    return memory


def populate(mapped: torch.Tensor) -> None:
    """Map the pages of a large tensor in a mapped file at once, before it is read."""
    if not mapped.is_contiguous() or mapped.nbytes < MIN_POPULATED_BYTES:
        return
    start = -(-mapped.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    size = (mapped.data_ptr() + mapped.nbytes - start) // PAGE_BYTES * PAGE_BYTES
    # an older kernel has no such advice, and maps the pages one by one
    address, length = ctypes.c_void_p(start), ctypes.c_size_t(size)
    ctypes.CDLL(None).madvise(address, length, _MADV_POPULATE_READ)
