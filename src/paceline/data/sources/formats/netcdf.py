"""netCDF 3 and 4 with netCDF4: values are unpacked by scale and offset; missing ones are NaN."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ....security.files import open_regular
from ...boundary import Boundary
from . import classic, convert_library_errors, hdf5, hdf5_references, import_format_package
from .cf import with_nan
from .stores import Array, Rows, StoreSource, check_sizes, native
from .stores import source as store_source

_LOCK = threading.Lock()  # the library is not thread-safe


def source(path: Path, name: str, labels: str | None, boundary: Boundary) -> StoreSource:
    _check_references(path, boundary)  # the library follows links already when it opens a file
    with _opened(path) as file:
        shapes = {key: tuple(one.shape) for key, one in file.variables.items()}
        coordinates = set(file.dimensions)
    note = classic.length_note(path)
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
            return hdf5_references.stored_bytes(file[name]) if name in file else 0

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
        if file.read(len(classic.MAGIC)) == classic.MAGIC:
            return
    hdf5_references.check_file(path, boundary)


def _opened(path: Path) -> Any:
    try:
        return import_format_package("netCDF4").Dataset(path)
    except OSError as error:
        raise ValueError(f"{path} can't be read as netCDF: {error}") from None
