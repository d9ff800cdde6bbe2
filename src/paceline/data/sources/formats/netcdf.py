"""netCDF, versions 3 and 4, by netCDF4: values are unpacked by their scale and offset, and missing
ones are NaN."""

import threading
from pathlib import Path
from typing import Any

import numpy as np

from . import classic, damage_told, hdf5, needed
from .stores import Array, Rows, StoreSource, check_sizes, native
from .stores import source as store_source

_LOCK = threading.Lock()  # the library is for one thread at a time


def source(path: Path, name: str, labels: str | None) -> StoreSource:
    with _opened(path) as file:
        shapes = {key: tuple(one.shape) for key, one in file.variables.items()}
        coordinates = set(file.dimensions)
    note = classic.lacks(path)
    if not name and len(shapes) > 1:  # a coordinate is no sample
        shapes = {key: shape for key, shape in shapes.items() if key not in coordinates} or shapes
    found = store_source(path, shapes, name, labels, NetRows)
    found.notes += [note] if note else []
    return found


class NetRows(Rows):
    """One variable."""

    def __init__(self, path: Path, name: str) -> None:
        self.told = f"{path}:{name}"
        self._file = _opened(path)
        self._data = self._file.variables[name]
        self.shape, self.dtype = tuple(self._data.shape[1:]), "float64"
        chunks = self._data.chunking()
        self.chunk = chunks[0] if isinstance(chunks, list) else 1
        check_sizes(self)
        self.dtype = self.read(0, 1).dtype.name if len(self) else "float32"
        self.note = self._lacks(path, name)

    def __len__(self) -> int:
        return int(self._data.shape[0])

    def read(self, first: int, end: int) -> Array:
        with damage_told(self.told), _LOCK:
            rows = self._data[first:end]
        if np.ma.isMaskedArray(rows):
            if rows.dtype.kind == "f":
                rows = rows.filled(np.nan)
            elif np.ma.is_masked(rows):
                raise ValueError(f"{self.told}: whole numbers, of which some are missing")
            else:
                rows = rows.data
        return native(rows, self.told)

    def _lacks(self, path: Path, name: str) -> str:
        """Of version 4, which is HDF5, where h5py is there to tell."""
        if not self._data._grp.data_model.startswith("NETCDF4"):
            return ""
        try:
            package = needed("h5py")
        except ValueError:
            return ""
        with _LOCK, package.File(path, "r") as file:
            return hdf5.lacks(file[name], self.told) if name in file else ""

    def close(self) -> None:
        with _LOCK:
            self._file.close()


def _opened(path: Path) -> Any:
    try:
        return needed("netCDF4").Dataset(path)
    except OSError as error:
        raise ValueError(f"{path}: is no netCDF file that can be read: {error}") from None
