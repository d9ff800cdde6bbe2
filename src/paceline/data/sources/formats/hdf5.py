"""HDF5, by h5py: arrays by name, or files' bytes as arrays of bytes of any length."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ....security.files import open_regular
from ....security.text import printable
from ...format.shard_format import ArraySpec
from . import About, Sample, damage_told, needed
from .stores import Array, Rows, StoreSource, check_sizes, field_of, missing_chunks, native
from .stores import source as store_source

CLASSES = "classes"  # attribute: their names
SHAPES = "shapes"  # of arrays that differ, which are flat in the file


def source(path: Path, name: str, labels: str | None) -> StoreSource:
    shapes: dict[str, tuple[int, ...]] = {}
    with _opened(path) as file:
        file.visititems(lambda key, one: _seen(shapes, key, one))
        classes = [str(one) for one in file.attrs.get(CLASSES, ())]
    found = store_source(path, shapes, name, labels, H5Rows)
    if found.label == "class":
        found.classes = classes
    return found


class H5Rows(Rows):
    """One dataset. h5py's own lock lets one thread in at a time."""

    def __init__(self, path: Path, name: str) -> None:
        self.told = f"{path}:{name}"
        self._file = _opened(path)
        self._data = self._file[name]
        self._shapes = self._file[SHAPES] if name == "x" and SHAPES in self._file else None
        kind = needed("h5py").check_vlen_dtype(self._data.dtype)
        text = needed("h5py").check_string_dtype(self._data.dtype)
        self.flat = kind is not None
        if text is not None or (kind == np.uint8 and self._shapes is None):
            self.dtype = "bytes"
        else:
            field = field_of(kind or self._data.dtype, self._data.shape)
            self.dtype, self.shape = field.dtype, field.shape
        self.chunk = self._data.chunks[0] if self._data.chunks else 1
        check_sizes(self)
        self.note = lacks(self._data, self.told)

    def __len__(self) -> int:
        return len(self._data)

    def read(self, first: int, end: int) -> Array:
        with damage_told(self.told):
            rows = self._data[first:end]
        if self.dtype == "bytes":
            return np.asarray(rows, dtype=object)
        if self.flat:
            return self._shaped(rows, first, end)
        return native(rows, self.told)

    def _shaped(self, rows: Any, first: int, end: int) -> Array:
        made = np.empty(end - first, object)
        shapes: Any = [(-1,)] * len(made)
        if self._shapes is not None:
            with damage_told(self.told):
                shapes = self._shapes[first:end]
        for k, (row, shape) in enumerate(zip(rows, shapes, strict=True)):
            made[k] = native(row, self.told).reshape(tuple(shape))
        return made

    def close(self) -> None:
        self._file.close()


def _opened(path: Path) -> Any:
    try:
        return needed("h5py").File(path, "r")
    except OSError as error:
        raise ValueError(f"{path}: is no HDF5 file that can be read: {error}") from None


def lacks(data: Any, told: str) -> str:
    """What of a dataset was never written, and reads as its fill value; or "". Raises ValueError
    where more or less is stored than its shape says."""
    _check_other_files(data, told)
    stored, chunks = data.id.get_storage_size(), data.chunks
    if data.external or data.is_virtual or not data.size:
        return ""
    if not chunks and not stored:
        return f"{told}: nothing of it is stored, and it reads as fill values"
    if not chunks:
        alike = not data.dtype.hasobject  # else they lie elsewhere
        if alike and stored != data.size * data.id.get_type().get_size():
            raise ValueError(
                f"{told}: is {data.shape} of {data.dtype}, and {stored:,} bytes are stored. "
                "HINT: copy it again"
            )
        return ""
    sides = zip(data.shape, chunks, strict=True)
    there, whole = data.id.get_num_chunks(), math.prod(-(-side // one) for side, one in sides)
    if there > whole:
        raise ValueError(
            f"{told}: is {data.shape}, and has {there:,} chunks where there are {whole:,}. "
            "HINT: copy it again"
        )
    return missing_chunks(told, there, whole)


def _check_other_files(data: Any, told: str) -> None:
    """Check that the other files that a dataset names are regular ones. Raises ValueError."""
    names = [name for name, *_ in data.external or ()]
    if data.is_virtual:
        names += [one.file_name for one in data.virtual_sources()]
    folder = Path(os.fsdecode(data.file.filename)).parent
    for name in {os.fsdecode(name) for name in names} - {"."}:
        try:
            os.close(open_regular(folder / name))
        except FileNotFoundError:  # reads as fill values, or the library says so
            continue
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{told}: its values are in {printable(name)}, which can't be read: {error}"
            ) from None


def _seen(shapes: dict[str, tuple[int, ...]], key: str, one: Any) -> None:
    if hasattr(one, "dtype"):  # no group
        shapes[key] = tuple(one.shape)


def write(path: Path, about: About, samples: Iterator[Sample]) -> None:
    """x, y and names; chunks of one sample, each with HDF5's checksum, as anybody's order is
    random."""
    h5py = needed("h5py")
    count, label = about.meta.samples, about.meta.label
    more = {"fletcher32": True}
    with h5py.File(path, "w") as file:
        x = shapes = None
        if about.array is not None:
            whole = (count, *about.array.shape)
            x = file.create_dataset("x", whole, about.array.dtype, chunks=(1, *whole[1:]), **more)
        y = names = None
        if label is not None:
            field = label if isinstance(label, ArraySpec) else ArraySpec("int64", ())
            y = file.create_dataset("y", (count, *field.shape), field.dtype)
        if about.meta.classes:
            file.attrs[CLASSES] = about.meta.classes
        if about.meta.names:
            names = file.create_dataset("names", count, h5py.string_dtype())
        for k, one in enumerate(samples):
            if x is None:
                x, shapes = _of_any_length(file, count, one, h5py)
            if isinstance(one.data, bytes):
                x[k] = np.frombuffer(one.data, np.uint8)
            elif shapes is not None:
                if one.data.ndim != shapes.shape[1] or one.data.dtype.name != _kind(x, h5py):
                    raise ValueError(
                        f"sample {k} is {one.data.dtype} of {one.data.shape}, which HDF5 has no "
                        "place for beside those before it. HINT: --to webdataset"
                    )
                x[k], shapes[k] = one.data.reshape(-1), one.data.shape
            else:
                x[k] = one.data
            if y is not None:
                y[k] = one.label
            if names is not None:
                names[k] = one.name


def _of_any_length(file: Any, count: int, first: Sample, h5py: Any) -> tuple[Any, Any]:
    """Datasets for samples that differ in size: flat ones, and their shapes; or bytes."""
    if isinstance(first.data, bytes):
        return file.create_dataset("x", count, h5py.vlen_dtype(np.uint8)), None
    x = file.create_dataset("x", count, h5py.vlen_dtype(first.data.dtype))
    return x, file.create_dataset(SHAPES, (count, first.data.ndim), "int64")


def _kind(x: Any, h5py: Any) -> str:
    return str(h5py.check_vlen_dtype(x.dtype).name)
