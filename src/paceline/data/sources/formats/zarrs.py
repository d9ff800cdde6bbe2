"""Zarr with its own package: a folder that is an array, or a group of arrays."""

import warnings
from pathlib import Path
from typing import Any

from ...boundary import Boundary
from . import convert_library_errors, import_format_package
from .cf import CFDecoder
from .stores import Array, Rows, StoreSource, check_sizes, field_of, missing_chunks, native
from .stores import source as store_source

UNSAFE_CODECS = ("pickle",)
DIMENSIONS_ATTRIBUTE, FILL_VALUE = "_ARRAY_DIMENSIONS", "_FillValue"  # of xarray
SINGLE_ARRAY = "array"  # name of an array outside of a group


def source(path: Path, name: str, labels: str | None, boundary: Boundary) -> StoreSource:
    found = _opened(path)
    if hasattr(found, "shape"):
        only = {SINGLE_ARRAY: tuple(found.shape)}
        return store_source(path, only, name or SINGLE_ARRAY, labels, ZarrRows, boundary)
    shapes: dict[str, tuple[int, ...]] = {}
    with warnings.catch_warnings(record=True) as caught:  # about members that are not Zarr
        warnings.simplefilter("always")
        for key, member in found.members(max_depth=None):
            if hasattr(member, "shape"):
                shapes[key] = tuple(member.shape)
    source = store_source(path, shapes, name, labels, ZarrRows, boundary)
    source.notes += [f"{path}: {warning.message}" for warning in caught]
    return source


class ZarrRows(Rows):
    """One Zarr array."""

    def __init__(self, path: Path, name: str) -> None:
        self.description = f"{path}:{name}"
        found = _opened(path)
        self._data = found if hasattr(found, "shape") else found[name]
        field = field_of(self._data.dtype, self._data.shape, self.description)
        self._decoder = CFDecoder(_attributes(self._data), field.dtype, self.description)
        self.dtype, self.shape = self._decoder.dtype, field.shape
        self.chunk = (getattr(self._data, "shards", None) or self._data.chunks)[0]
        check_sizes(self, lambda: int(self._data.nbytes_stored()))
        check_codecs(self._data, self.description)
        self.note = missing_chunks(
            self.description, self._data.nchunks_initialized, self._data.nchunks
        )

    def __len__(self) -> int:
        return int(self._data.shape[0])

    def read(self, first: int, end: int) -> Array:
        return self._read(slice(first, end))

    def read_part(self, i: int, part: tuple[slice, ...]) -> Array:
        return self._read((i, *part))

    def _read(self, index: Any) -> Array:
        with convert_library_errors(self.description):
            return self._decoder.decode(native(self._data[index], self.description))


def _attributes(data: Any) -> dict[str, Any]:
    """Return the attributes of an array. In zarr version 2, xarray stores _FillValue as the fill
    value of the array."""
    attributes = dict(data.attrs)
    if DIMENSIONS_ATTRIBUTE in attributes and data.metadata.zarr_format == 2:
        attributes.setdefault(FILL_VALUE, data.fill_value)
    return attributes


def check_codecs(data: Any, description: str) -> None:
    """Refuse codecs that run code from the file. Raises ValueError."""
    meta = getattr(data, "metadata", data)
    codecs = [*(getattr(meta, "filters", None) or ()), getattr(meta, "compressor", None)]
    for codec in codecs:
        if getattr(codec, "codec_id", "") in UNSAFE_CODECS:
            raise ValueError(
                f"{description} has the codec {codec.codec_id}, which runs code from the file"
            )


def _opened(path: Path) -> Any:
    zarr = import_format_package("zarr")
    try:
        return zarr.open(str(path), mode="r")
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} can't be read as zarr: {error}") from None
