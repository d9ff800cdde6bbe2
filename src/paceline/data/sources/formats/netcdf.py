"""netCDF 3 and 4 with netCDF4: values are unpacked by scale and offset; missing ones are NaN."""

import math
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ....security.files import open_regular
from ...boundary import Boundary
from . import convert_library_errors, hdf5, import_format_package
from .cf import with_nan
from .stores import Array, Rows, StoreSource, check_sizes, native
from .stores import source as store_source

_LOCK = threading.Lock()  # the library is not thread-safe


# Check the length of a netCDF 3 file, as its library reads what was truncated as zeros.
#
# Only the header is read here, by the specification (CDF-1, CDF-2 and CDF-5).

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


def source(path: Path, name: str, labels: str | None, boundary: Boundary) -> StoreSource:
    _check_references(path, boundary)  # the library follows links already when it opens a file
    with _opened(path) as file:
        shapes = {key: tuple(variable.shape) for key, variable in file.variables.items()}
        coordinates = set(file.dimensions)
    note = length_note(path)
    if not name and len(shapes) > 1:  # coordinate variables are not samples
        shapes = {key: shape for key, shape in shapes.items() if key not in coordinates} or shapes
    found = store_source(path, shapes, name, labels, NetCDFRows, boundary)
    found.notes += [note] if note else []
    return found


class NetCDFRows(Rows):
    """One netCDF variable."""

    def __init__(self, path: Path, name: str) -> None:
        self.description = f"{path}:{name}"
        self._file = _opened(path)
        self._data = self._file.variables[name]
        self.shape, self.dtype = tuple(self._data.shape[1:]), "float64"
        chunks = self._data.chunking()
        self.chunk = chunks[0] if isinstance(chunks, list) else 1
        check_sizes(self, partial(self._stored_bytes, path, name))
        self.dtype = self.read(0, 1).dtype.name if len(self) else "float32"
        self.note = self._unwritten_note(path, name)

    def __len__(self) -> int:
        return int(self._data.shape[0])

    def read(self, first: int, end: int) -> Array:
        return self._read(slice(first, end))

    def read_part(self, i: int, part: tuple[slice, ...]) -> Array:
        return self._read((i, *part)).astype(self.dtype, copy=False)

    def _read(self, index: Any) -> Array:
        with convert_library_errors(self.description), _LOCK:
            rows = self._data[index]
        if np.ma.isMaskedArray(rows):
            rows = with_nan(rows.data, np.ma.getmaskarray(rows), self.description)
        return native(rows, self.description)

    def _stored_bytes(self, path: Path, name: str) -> int:
        if not self._data._grp.data_model.startswith("NETCDF4"):
            return path.stat().st_size
        with _LOCK, import_format_package("h5py").File(path, "r") as file:
            return hdf5.stored_bytes(file[name]) if name in file else 0

    def _unwritten_note(self, path: Path, name: str) -> str:
        """Return a note for version 4, which is HDF5."""
        if not self._data._grp.data_model.startswith("NETCDF4"):
            return ""
        with _LOCK, import_format_package("h5py").File(path, "r") as file:
            return hdf5.unwritten_note(file[name], self.description) if name in file else ""

    def close(self) -> None:
        with _LOCK:
            self._file.close()


def _check_references(path: Path, boundary: Boundary) -> None:
    """Check the files that version 4, which is HDF5, refers to. Raises ValueError, also if h5py is
    not installed."""
    with open(open_regular(path), "rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            return
    hdf5.check_file(path, boundary)


def _opened(path: Path) -> Any:
    try:
        return import_format_package("netCDF4").Dataset(path)
    except OSError as error:
        raise ValueError(f"{path} can't be read as netCDF: {error}") from None
