"""netCDF, versions 3 and 4, by netCDF4: values are unpacked by their scale and offset, and missing
ones are NaN."""

import threading
from pathlib import Path
from typing import Any

import numpy as np

from . import needed
from .stores import Array, Rows, StoreSource, native
from .stores import source as store_source

_LOCK = threading.Lock()  # the library is for one thread at a time


def source(path: Path, name: str, labels: str | None) -> StoreSource:
    with _opened(path) as file:
        shapes = {key: tuple(one.shape) for key, one in file.variables.items()}
        coordinates = set(file.dimensions)
    if not name and len(shapes) > 1:  # a coordinate is no sample
        shapes = {key: shape for key, shape in shapes.items() if key not in coordinates} or shapes
    return store_source(path, shapes, name, labels, NetRows)


class NetRows(Rows):
    """One variable."""

    def __init__(self, path: Path, name: str) -> None:
        self.told = f"{path}:{name}"
        self._file = _opened(path)
        self._data = self._file.variables[name]
        self.shape = tuple(self._data.shape[1:])
        self.dtype = self.read(0, 1).dtype.name if len(self) else "float32"
        chunks = self._data.chunking()
        self.chunk = chunks[0] if isinstance(chunks, list) else 1

    def __len__(self) -> int:
        return int(self._data.shape[0])

    def read(self, first: int, end: int) -> Array:
        try:
            with _LOCK:
                rows = self._data[first:end]
        except RuntimeError as error:
            raise ValueError(f"{self.told}: can't be read: {error}") from None
        if np.ma.isMaskedArray(rows):
            if rows.dtype.kind == "f":
                rows = rows.filled(np.nan)
            elif np.ma.is_masked(rows):
                raise ValueError(f"{self.told}: whole numbers, of which some are missing")
            else:
                rows = rows.data
        return native(rows, self.told)

    def close(self) -> None:
        with _LOCK:
            self._file.close()


def _opened(path: Path) -> Any:
    try:
        return needed("netCDF4").Dataset(path)
    except OSError as error:
        raise ValueError(f"{path}: is no netCDF file that can be read: {error}") from None
