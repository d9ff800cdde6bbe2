"""Check the length of a netCDF 3 file, as its library reads what was truncated as zeros.

Only the header is read here, by the specification (CDF-1, CDF-2 and CDF-5).
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
MAX_DIMS = 1024  # the library's limit
PADDING = 4  # bytes to which values are aligned
SIZES = (0, 1, 1, 2, 4, 4, 8, 1, 2, 4, 8, 8)  # bytes of a value, by the type's number


class _Variable(NamedTuple):
    begin: int
    size: int  # bytes, of one record for a record variable
    records: bool


class _Header:
    """Read the numbers of a file's header, big endian. width: bytes of a count, 4 or 8; offset:
    bytes of a variable's offset. A header longer than MAX_HEADER_BYTES is considered damaged."""

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
            raise ValueError("its header is damaged or truncated")
        return data

    def padded(self, count: int) -> None:
        self.bytes(count + -count % 4)

    def items(self) -> Iterator[int]:
        self.number(4)  # the list's tag
        yield from range(self.number())

    def attributes(self) -> None:
        for _ in self.items():
            self.padded(self.number())
            size = SIZES[self.number(4)]
            self.padded(size * self.number())


def length_note(path: Path) -> str:
    """Return a note about a file that is longer than its header says, or "". Raises ValueError for
    one that is shorter."""
    with open(open_regular(path), "rb") as file:
        magic = file.read(4)
        if magic[:3] != MAGIC or magic[3:] not in VERSIONS:
            return ""
        header = _Header(file, magic[3])
        try:
            records, variables = _variables(header)
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path} can't be read as netCDF: {error}") from None
        size = os.fstat(file.fileno()).st_size
    record_variables = [variable for variable in variables if variable.records]
    record_bytes = sum(
        variable.size + (-variable.size % 4 if len(record_variables) > 1 else 0)
        for variable in record_variables
    )
    ends = [variable.begin + variable.size for variable in variables if not variable.records]
    if records == (1 << 8 * header.width) - 1:  # the specification's value for streams
        records = 0
    if records:
        ends += [
            variable.begin + (records - 1) * record_bytes + variable.size
            for variable in record_variables
        ]
    end = max(ends, default=0)
    if size < end:
        raise ValueError(
            f"{path} is truncated: it has {size:,} bytes of at least {end:,}. HINT: copy it again"
        )
    if record_bytes and records and size >= end + record_bytes:
        return f"{path} is longer than its {records:,} records: records may be missing"
    if not record_variables and size >= end + PADDING:
        return f"{path} is longer than its header says: values may be missing"
    return ""


def _variables(header: _Header) -> tuple[int, list[_Variable]]:
    """Return the number of records, and the variables."""
    records, dims, found = header.number(), list[int](), list[_Variable]()
    for _ in header.items():
        header.padded(header.number())
        dims.append(header.number())
    header.attributes()
    for _ in header.items():
        header.padded(header.number())
        count = header.number()
        if count > MAX_DIMS:
            raise ValueError(f"a variable of {count:,} dimensions")
        sides = [dims[header.number()] for _ in range(count)]
        header.attributes()
        size = SIZES[header.number(4)]
        header.number()  # the variable's size, which overflows for large ones
        begin = header.number(header.offset)
        stacked = bool(sides) and not sides[0]
        found.append(_Variable(begin, size * math.prod(sides[stacked:]), stacked))
    return records, found
