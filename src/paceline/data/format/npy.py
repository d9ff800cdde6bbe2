""".npy files: the header is checked before memory is taken for the array."""

import math
from io import BytesIO
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.lib import format as npy_format

from .meta_schema import MAX_DIMS

MAX_SIDE = 1 << 62


class Header(NamedTuple):
    """What a .npy file says of its array. start: bytes of the header."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: BinaryIO) -> Header:
    """Read the header of a .npy file, at its start.

    Raises:
        ValueError: It is none, or its array is not one of numbers with at most MAX_DIMS dims.
    """
    try:
        version = npy_format.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = npy_format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, fortran, dtype = npy_format.read_array_header_2_0(file)
        else:
            raise ValueError(f"format version {version}")
    except Exception as error:  # numpy parses it as Python, and raises what that does
        raise ValueError(f"is no .npy file that can be read: {error}") from None
    if dtype.hasobject or dtype.kind not in "biufc":
        raise ValueError(f"is no .npy file that can be read: an array of {dtype}, not of numbers")
    if len(shape) > MAX_DIMS or not all(0 <= int(side) < MAX_SIDE for side in shape):
        raise ValueError(f"is no .npy file that can be read: its shape is {shape}"[:200])
    return Header(tuple(int(side) for side in shape), bool(fortran), dtype, file.tell())


def array_from_npy(data: Any) -> np.ndarray[Any, Any]:
    """Return the array of a .npy file's bytes: a view of them. Raises ValueError for others."""
    header = read_header(BytesIO(data[: 1 << 16]))
    left = len(data) - header.start
    if header.nbytes > left:
        raise ValueError(
            f"is no .npy file that can be read: it has {left:,} bytes of {header.nbytes:,}"
        )
    count = math.prod(header.shape)
    flat = np.frombuffer(data, header.dtype, count, header.start)
    if header.fortran:
        return flat.reshape(header.shape[::-1]).transpose()
    return flat.reshape(header.shape)
