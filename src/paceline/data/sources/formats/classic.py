"""How long a netCDF file of version 3 has to be. Its library reads what was cut off as zeros.

The header is read as the specification has it (CDF-1, CDF-2 and CDF-5); data are the library's.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ....security.files import open_regular

MAGIC = b"CDF"
VERSIONS = (b"\1", b"\2", b"\5")
MAX_HEADER_BYTES = 16 << 20
MAX_DIMS = 1024  # as the library has it
SIZES = (0, 1, 1, 2, 4, 4, 8, 1, 2, 4, 8, 8)  # bytes of a value, by the type's number


class _Variable(NamedTuple):
    begin: int
    size: int  # bytes, of one record where it has such
    records: bool


class _Header:
    """Numbers of a file's header, big endian. width: of counts, 4 or 8 bytes; offset: of where a
    variable begins. A header longer than MAX_HEADER_BYTES is a damaged one."""

    def __init__(self, file: BinaryIO, version: int) -> None:
        self._file, self._left = file, MAX_HEADER_BYTES
        self.width, self.offset = (8 if version == 5 else 4), (4 if version == 1 else 8)

    def number(self, width: int = 0) -> int:
        width = width or self.width
        return int.from_bytes(self.bytes(width), "big")

    def bytes(self, count: int) -> bytes:
        self._left -= count
        data = self._file.read(count) if self._left >= 0 else b""
        if len(data) < count:
            raise ValueError("its header is damaged, or cut")
        return data

    def padded(self, count: int) -> None:
        self.bytes(count + -count % 4)

    def items(self) -> Iterator[int]:
        self.number(4)  # what kind of list
        yield from range(self.number())

    def attributes(self) -> None:
        for _ in self.items():
            self.padded(self.number())
            size = SIZES[self.number(4)]
            self.padded(size * self.number())


def lacks(path: Path) -> str:
    """What has to be said of a file that is longer than its header says, or "". Raises ValueError
    for one that is shorter."""
    with open(open_regular(path), "rb") as file:
        magic = file.read(4)
        if magic[:3] != MAGIC or magic[3:] not in VERSIONS:
            return ""
        header = _Header(file, magic[3])
        try:
            records, variables = _variables(header)
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path}: is no netCDF file that can be read: {error}") from None
        size = os.fstat(file.fileno()).st_size
    own = [one for one in variables if one.records]
    each = sum(one.size + (-one.size % 4 if len(own) > 1 else 0) for one in own)
    ends = [one.begin + one.size for one in variables if not one.records]
    if records == (1 << 8 * header.width) - 1:  # it was written as a stream
        records = 0
    if records:
        ends += [one.begin + (records - 1) * each + one.size for one in own]
    end = max(ends, default=0)
    if size < end:
        raise ValueError(
            f"{path}: is truncated: {size:,} bytes of at least {end:,}. HINT: copy it again"
        )
    more = bool(each and records and size >= end + each)
    return f"{path}: is longer than its {records:,} records: are there more?" if more else ""


def _variables(header: _Header) -> tuple[int, list[_Variable]]:
    """How many records there are, and the variables."""
    records, dims, found = header.number(), list[int](), list[_Variable]()
    for _ in header.items():
        header.padded(header.number())
        dims.append(header.number())
    header.attributes()
    for _ in header.items():
        header.padded(header.number())
        count = header.number()
        if count > MAX_DIMS:
            raise ValueError(f"a variable of {count:,} dims")
        sides = [dims[header.number()] for _ in range(count)]
        header.attributes()
        size = SIZES[header.number(4)]
        header.number()  # its size, which does not fit for large ones
        begin = header.number(header.offset)
        stacked = bool(sides) and not sides[0]
        found.append(_Variable(begin, size * math.prod(sides[stacked:]), stacked))
    return records, found
