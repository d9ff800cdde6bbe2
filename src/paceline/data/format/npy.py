"""Reading of .npy files. The header is checked before memory is allocated for the array."""

import math
from io import BytesIO
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.lib import format as npy_format

from .meta_schema import MAX_DIMS

MAX_SIDE = 1 << 62


class Header(NamedTuple):
    """Header of a .npy file.

    Attributes:
        shape: Shape of the array.
        fortran: Whether the array is in Fortran order.
        dtype: Dtype of the array.
        start: Offset of the data, in bytes.
    """

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: BinaryIO) -> Header:
    """Read the header at the start of a .npy file.

    Raises:
        ValueError: It is not a .npy file, or the array is not numeric with at most MAX_DIMS
            dimensions.
    """
    try:
        version = npy_format.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = npy_format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, fortran, dtype = npy_format.read_array_header_2_0(file)
        else:
            raise ValueError(f"format version {version}")
    except Exception as error:  # numpy parses Python literals, which may raise anything
        raise ValueError(f"can't be read as a .npy file: {error}") from None
    if dtype.hasobject or dtype.kind not in "biufc":
        raise ValueError(f"can't be read as a .npy file: its dtype {dtype} is not numeric")
    if len(shape) > MAX_DIMS or not all(0 <= int(side) < MAX_SIDE for side in shape):
        raise ValueError(f"can't be read as a .npy file: its shape is {shape}"[:200])
    return Header(tuple(int(side) for side in shape), bool(fortran), dtype, file.tell())


def parse_npy(data: Any) -> np.ndarray[Any, Any]:
    """Return the array in the bytes of a .npy file, as a view.

    Raises:
        ValueError: The data is not a valid .npy file.
    """
    header = read_header(BytesIO(data[: 1 << 16]))
    left = len(data) - header.start
    if header.nbytes > left:
        raise ValueError(
            f"can't be read as a .npy file: it has {left:,} bytes of {header.nbytes:,}"
        )
    count = math.prod(header.shape)
    flat = np.frombuffer(data, header.dtype, count, header.start)
    if header.fortran:
        return flat.reshape(header.shape[::-1]).transpose()
    return flat.reshape(header.shape)
