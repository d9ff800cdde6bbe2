"""Buffers of batches, reused once nothing refers to a batch any more.

After the first few batches no page is new to the kernel: page faults are a third of the cost of an
array batch.
"""

import mmap
import os
import weakref
from collections import OrderedDict, deque
from contextlib import suppress
from itertools import count
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
MMAP_BYTES = 64 << 10  # from this size on, freed memory is returned to the system
HUGE_BYTES = 4 << 20  # from this size on, huge pages are requested, as NumPy does
# Decoding JPEGs into memory that begins at a page boundary takes 2 % longer (malloc: 16 as well).
OFFSET = 16
MAX_SIZES = 8  # the last batch of an epoch, and those of uneven shares, are smaller
_numbers = count()


class BufferPool:
    """A pool of buffers for batches.

    ``take`` returns an array. When the last reference to the array is dropped (a tensor made from
    it, a view of that tensor, what autograd saved), its memory is reused for the next array of the
    same field and size.

    Args:
        shared: Whether other processes can map the memory, by ``handle``: an unnamed file, which
            exists until the last process closes it.

    Attributes:
        max_free: Number of unused buffers of a field and size that are kept; the memory of others
            is returned to the system.
        numbers: Numbers of the buffers that exist, if they are shared.
    """

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared
        self.max_free = 5
        self.numbers: set[int] = set()
        self.allocated = 0  # number of buffers allocated in total
        # Unused buffers by (field, size), those used last at the end.
        self._free: OrderedDict[tuple[int, int], deque[Array]] = OrderedDict()
        self._waiting: dict[int, weakref.ref[Any]] = {}  # kept: a freed weakref runs no callback
        self._files: dict[int, tuple[int, int]] = {}  # by the address of a buffer

    def take(self, shape: tuple[int, ...], dtype: Any, field: int = 0) -> Array:
        """Return an uninitialized C-contiguous array. field: 0 for samples, 1 for labels."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        free = self._free.setdefault((field, size), deque())
        self._free.move_to_end((field, size))
        if len(self._free) > MAX_SIZES:
            self._free.popitem(last=False)
        memory = free.pop() if free else self._new(max(size, 1))
        # torch.from_numpy refers to this very object, so it is freed together with the batch.
        array: Array = memory[:size].view(kind).reshape(shape)

        def release(reference: weakref.ref[Any]) -> None:
            del self._waiting[id(reference)]
            free.append(memory)
            if len(free) > self.max_free:
                with suppress(IndexError):  # another thread may have done it
                    free.popleft()

        reference = weakref.ref(array, release)
        self._waiting[id(reference)] = reference
        return array

    def handle(self, array: Array) -> tuple[int, int]:
        """Return the number of the buffer of an array from ``take``, and its file descriptor.

        Buffer numbers are never reused; file descriptors are.
        """
        return self._files[array.ctypes.data]

    def _new(self, size: int) -> Array:
        self.allocated += 1
        if not self.shared:
            return _allocate(size)
        file = os.memfd_create("paceline-batch", os.MFD_CLOEXEC)
        os.ftruncate(file, size)
        memory = map_file(file, size)
        address, number = memory.ctypes.data, next(_numbers)
        self._files[address] = (number, file)
        self.numbers.add(number)
        # refers to no part of the pool that refers to the memory
        weakref.finalize(memory, _close, self._files, self.numbers, address)
        return memory


def _allocate(size: int) -> Array:
    # malloc keeps much of what is freed, because later small allocations lie behind it.
    if size < MMAP_BYTES:
        return np.empty(size, np.uint8)
    memory = mmap.mmap(-1, size + OFFSET, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_BYTES:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[OFFSET:]


def _close(files: dict[int, tuple[int, int]], numbers: set[int], address: int) -> None:
    number, file = files.pop(address)
    numbers.discard(number)
    os.close(file)


def map_file(file: int, size: int) -> Array:
    """Map a file; the bytes are shared with the other processes that map it."""
    return np.frombuffer(mmap.mmap(file, size), np.uint8)
