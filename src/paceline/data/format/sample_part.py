"""Read a part of an array that a file has in C order, without reading all of it."""

import os
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from .meta_schema import ArraySpec

MIN_RUN_BYTES = 1 << 15  # shorter runs of bytes take longer than what lies between them


def read_part(
    file: int, offset: int, array: ArraySpec, part: Sequence[slice] | None
) -> np.ndarray[Any, Any]:
    """Return a part of an array as a copy.

    Args:
        file: Descriptor.
        offset: Of the array in the file, in bytes.
        part: Slices with step 1 for all dims; None: the whole array.

    Raises:
        ValueError: The file ends before.
        OSError: The file can't be read.
    """
    shape = array.shape
    if not shape:  # one number
        number = _read(file, offset, np.dtype(array.dtype).itemsize)
        return np.frombuffer(number, array.dtype).reshape(())
    slices = part or (slice(None),) * len(shape)
    bounds = [one.indices(n)[:2] for one, n in zip(slices, shape, strict=True)]
    counts = [max(stop - start, 0) for start, stop in bounds]
    found = np.empty(counts, array.dtype)
    if not found.size:
        return found
    strides = [prod(shape[dim + 1 :]) * found.itemsize for dim in range(len(shape))]
    level = _run_dim(counts, shape, strides)
    inner = (slice(None), *(slice(*one) for one in bounds[level + 1 :]))
    for index in product(*map(range, counts[:level])):
        at = offset + bounds[level][0] * strides[level]
        at += sum(
            (start + i) * stride
            for (start, _), i, stride in zip(bounds, index, strides, strict=False)
        )
        run = _read(file, at, counts[level] * strides[level])
        block = np.frombuffer(run, array.dtype).reshape(counts[level], *shape[level + 1 :])
        found[index] = block[inner]
    return found


def _run_dim(counts: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the dim whose rows are read at once, with all of the dims after it."""
    divided = [dim for dim, (count, n) in enumerate(zip(counts, shape, strict=True)) if count < n]
    dim = max(divided, default=0)
    while dim and counts[dim] * strides[dim] < MIN_RUN_BYTES:
        dim -= 1
    return dim


def _read(file: int, offset: int, size: int) -> bytearray:
    run = bytearray(size)
    left = memoryview(run)
    while len(left):
        done = os.preadv(file, [left], offset)
        if not done:
            raise ValueError("the shard is truncated")
        left, offset = left[done:], offset + done
    return run
