"""Memory of batches that is used again once nothing refers to a batch any more: no page of it is
new to the kernel after the first few, which is a third of the cost of an array batch."""

import mmap
import os
import weakref
from itertools import count
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_numbers = count()


class BufferPool:
    """``take`` gives an array. When the last reference to it goes (a tensor made of it, a view of
    that, what autograd keeps), its memory is given to the next one of the same size.

    shared: memory that other processes can have as well, by ``handle``: a file without a name,
    which goes with the last of them.
    """

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared
        self.allocated = 0  # pieces of memory, ever
        self._free: dict[int, list[Array]] = {}  # by size
        self._waiting: dict[int, weakref.ref[Any]] = {}  # a dead reference calls nobody
        self._files: dict[int, tuple[int, int]] = {}  # by the address of a piece

    def take(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array in C order; its content is whatever was there before."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else self._new(max(size, 1))
        # What torch.from_numpy refers to is this very object, so its death is the batch's.
        array: Array = memory[:size].view(kind).reshape(shape)

        def died(reference: weakref.ref[Any]) -> None:
            del self._waiting[id(reference)]
            free.append(memory)

        reference = weakref.ref(array, died)
        self._waiting[id(reference)] = reference
        return array

    def handle(self, array: Array) -> tuple[int, int]:
        """Of an array that ``take`` has given: the number of its memory, and the file behind it.
        Numbers are not used again, as files' are."""
        return self._files[array.ctypes.data]

    def _new(self, size: int) -> Array:
        self.allocated += 1
        if not self.shared:
            return np.empty(size, np.uint8)
        file = os.memfd_create("paceline-batch", os.MFD_CLOEXEC)
        os.ftruncate(file, size)
        memory = map_file(file, size)
        self._files[memory.ctypes.data] = (next(_numbers), file)
        weakref.finalize(memory, os.close, file)
        return memory


def map_file(file: int, size: int) -> Array:
    """A file's bytes, shared with whoever else has mapped it."""
    return np.frombuffer(mmap.mmap(file, size), np.uint8)
