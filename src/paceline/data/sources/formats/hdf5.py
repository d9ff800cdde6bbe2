"""HDF5 with h5py: named arrays, or files' bytes as variable-length arrays of bytes."""

import glob
import math
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ....security.files import open_regular
from ....security.text import printable
from ...boundary import Boundary
from ...format.shard_format import label_spec
from . import ExportInfo, Sample, convert_library_errors, import_format_package
from .cf import CFDecoder
from .stores import Array, Rows, StoreSource, check_sizes, field_of, missing_chunks, native
from .stores import source as store_source

CLASSES_ATTRIBUTE = "classes"  # class names
# Environment variables with folders in which HDF5 searches.
PREFIXES = ("HDF5_EXT_PREFIX", "HDF5_EXTFILE_PREFIX", "HDF5_VDS_PREFIX")
SHAPES_DATASET = "shapes"  # of arrays of different shapes, which are stored flat


def source(path: Path, name: str, labels: str | None, boundary: Boundary) -> StoreSource:
    shapes: dict[str, tuple[int, ...]] = {}
    with _opened(path) as file:
        file.visititems(lambda key, item: _add_shape(shapes, key, item))
        classes = [str(item) for item in file.attrs.get(CLASSES_ATTRIBUTE, ())]
    open_rows = partial(HDF5Rows, boundary=boundary)
    found = store_source(path, shapes, name, labels, open_rows, boundary)
    if found.label == "class":
        found.classes = classes
    return found


class HDF5Rows(Rows):
    """One HDF5 dataset. h5py has a lock that lets one thread in at a time."""

    def __init__(self, path: Path, name: str, boundary: Boundary) -> None:
        self.description = f"{path}:{name}"
        self._file = _opened(path)
        self._data = self._file[name]
        check_dataset(self._data, self.description, boundary)
        h5py = import_format_package("h5py")
        self._shapes = None
        # Not a link: it could lead to another file.
        if name == "x" and type(self._file.get(SHAPES_DATASET, getlink=True)) is h5py.HardLink:
            self._shapes = self._file[SHAPES_DATASET]
            check_dataset(self._shapes, f"{path}:{SHAPES_DATASET}", boundary)
        kind = h5py.check_vlen_dtype(self._data.dtype)
        text = h5py.check_string_dtype(self._data.dtype)
        self.flat = kind is not None
        if text is not None or (kind == np.uint8 and self._shapes is None):
            self.dtype = "bytes"
        else:
            field = field_of(kind or self._data.dtype, self._data.shape, self.description)
            self._decoder = CFDecoder(dict(self._data.attrs), field.dtype, self.description)
            self.dtype, self.shape = self._decoder.dtype, field.shape
        self.chunk = self._data.chunks[0] if self._data.chunks else 1
        check_sizes(self, lambda: stored_bytes(self._data))
        self.note = unwritten_note(self._data, self.description)

    def __len__(self) -> int:
        return len(self._data)

    def read(self, first: int, end: int) -> Array:
        with convert_library_errors(self.description):
            rows = self._data[first:end]
        if self.dtype == "bytes":
            return np.asarray(rows, dtype=object)
        if self.flat:
            return self._shaped(rows, first, end)
        return self._decoder.decode(native(rows, self.description))

    def read_part(self, i: int, part: tuple[slice, ...]) -> Array:
        with convert_library_errors(self.description):
            rows = self._data[(i, *part)]
        return self._decoder.decode(native(rows, self.description))

    def _shaped(self, rows: Any, first: int, end: int) -> Array:
        arrays = np.empty(end - first, object)
        shapes: Any = [(-1,)] * len(arrays)
        if self._shapes is not None:
            with convert_library_errors(self.description):
                shapes = self._shapes[first:end]
        for k, (row, shape) in enumerate(zip(rows, shapes, strict=True)):
            values = self._decoder.decode(native(row, self.description))
            arrays[k] = values.reshape(tuple(shape))
        return arrays

    def close(self) -> None:
        self._file.close()


def _opened(path: Path) -> Any:
    try:
        return import_format_package("h5py").File(path, "r")
    except OSError as error:
        raise ValueError(f"{path} can't be read as HDF5: {error}") from None


def unwritten_note(data: Any, description: str) -> str:
    """Return a note if parts of a dataset were never written and read as its fill value; else "".
    Raises ValueError if the stored size does not match its shape."""
    stored, chunks = data.id.get_storage_size(), data.chunks
    if data.external or data.is_virtual or not data.size:
        return ""
    if not chunks and not stored:
        return f"{description} has no stored values: all are read as fill values"
    if not chunks:
        # Variable-length values are stored elsewhere.
        fixed_size = not data.dtype.hasobject
        if fixed_size and stored != data.size * data.id.get_type().get_size():
            raise ValueError(
                f"{description} is {data.dtype} of {data.shape}, but {stored:,} bytes are stored. "
                "HINT: copy the file again"
            )
        return ""
    stored_chunks = data.id.get_num_chunks()
    whole = math.prod(-(-side // of) for side, of in zip(data.shape, chunks, strict=True))
    if stored_chunks > whole:
        raise ValueError(
            f"{description}, of the shape {data.shape}, has {stored_chunks:,} chunks instead of "
            f"{whole:,}. HINT: copy the file again"
        )
    return missing_chunks(description, stored_chunks, whole)


def _add_shape(shapes: dict[str, tuple[int, ...]], key: str, item: Any) -> None:
    if hasattr(item, "shape"):  # no group, and no named type
        shapes[key] = tuple(item.shape or ())  # None: it has no values


def write(path: Path, info: ExportInfo, samples: Iterator[Sample]) -> None:
    """Write x, y and names. Chunks hold one sample each, with HDF5's checksum, as training reads in
    random order."""
    h5py = import_format_package("h5py")
    count, label = info.meta.samples, info.meta.label
    more = {"fletcher32": True}
    with h5py.File(path, "w") as file:
        x = shapes = None
        if info.array is not None:
            whole = (count, *info.array.shape)
            x = file.create_dataset("x", whole, info.array.dtype, chunks=(1, *whole[1:]), **more)
        y = names = None
        if label is not None:
            field = label_spec(label)
            assert field is not None
            y = file.create_dataset("y", (count, *field.shape), field.dtype)
        if info.meta.classes:
            file.attrs[CLASSES_ATTRIBUTE] = info.meta.classes
        if info.meta.names:
            names = file.create_dataset("names", count, h5py.string_dtype())
        for k, item in enumerate(samples):
            if x is None:
                x, shapes = _create_variable_length(file, count, item, h5py)
            if isinstance(item.data, bytes):
                x[k] = np.frombuffer(item.data, np.uint8)
            elif shapes is not None:
                if item.data.ndim != shapes.shape[1] or item.data.dtype.name != _kind(x, h5py):
                    raise ValueError(
                        f"sample {k} is {item.data.dtype} of {item.data.shape}, which HDF5 can't "
                        "store with the samples before it. HINT: --to webdataset"
                    )
                x[k], shapes[k] = item.data.reshape(-1), item.data.shape
            else:
                x[k] = item.data
            if y is not None:
                y[k] = item.label
            if names is not None:
                names[k] = item.name


def _create_variable_length(file: Any, count: int, first: Sample, h5py: Any) -> tuple[Any, Any]:
    """Create datasets for samples of different sizes: flat arrays and their shapes, or bytes."""
    if isinstance(first.data, bytes):
        return file.create_dataset("x", count, h5py.vlen_dtype(np.uint8)), None
    x = file.create_dataset("x", count, h5py.vlen_dtype(first.data.dtype))
    return x, file.create_dataset(SHAPES_DATASET, (count, first.data.ndim), "int64")


def _kind(x: Any, h5py: Any) -> str:
    return str(h5py.check_vlen_dtype(x.dtype).name)


# References of HDF5 files to other files: external links, raw values in other files (external
# storage), and virtual datasets.
#
# The HDF5 library searches a file in several places. All that exist are checked before any value
# is read, as well as the files that those refer to.


def check_dataset(data: Any, description: str, boundary: Boundary) -> None:
    """Check all files that the values of an open dataset may be read from.

    Raises:
        ValueError: One is outside of the boundary, or is not a regular file.
    """
    _check(set(_files_of(data, description)), boundary)


def check_file(path: Path, boundary: Boundary) -> None:
    """Check all files that any link or dataset of a file refers to. Raises the same errors."""
    _check(set(_files_in(path)), boundary)


def stored_bytes(data: Any) -> int:
    """Return the size on disk of the values of an open dataset; at most, for those in other files,
    the size of these files."""
    size = os.stat(data.file.filename).st_size
    size = 0 if data.external or data.is_virtual else min(data.id.get_storage_size(), size)
    others = {os.path.realpath(file) for file, _ in _files_of(data, "")}
    return size + sum(os.stat(file).st_size for file in others if os.path.exists(file))


def _check(waiting: set[tuple[str, str]], boundary: Boundary) -> None:
    """Check (file, referrer) and all files that those refer to."""
    seen = set[str]()
    while waiting:
        file, referrer = waiting.pop()
        boundary.check(file, referrer)
        try:
            os.close(open_regular(file))
        except FileNotFoundError:  # a link to nowhere; values are then read as fill values
            continue
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{referrer} has its values in {printable(file)}, which can't be read: {error}"
            ) from None
        real = os.path.realpath(file)
        if real not in seen:
            seen.add(real)
            waiting |= set(_files_in(Path(file)))


def _files_in(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (file, referrer) for all links and datasets of a file; none if it is not HDF5."""
    h5py = import_format_package("h5py")
    try:
        file = h5py.File(path, "r")
    except OSError:  # raw values
        return
    with file:
        links, datasets = list[tuple[str, Any]](), list[Any]()
        file.visititems_links(lambda name, link: links.append((name, link)))
        file.visititems(lambda _, item: datasets.append(item) if hasattr(item, "shape") else None)
        for name, link in links:
            if isinstance(link, h5py.ExternalLink):
                referrer = f"{path}:{name}"
                yield from _candidates([glob.escape(link.filename)], path, referrer)
        for item in datasets:
            yield from _files_of(item, f"{path}:{item.name.lstrip('/')}")


def _files_of(data: Any, description: str) -> Iterator[tuple[str, str]]:
    """Yield (file, referrer) for the files that a dataset refers to."""
    path = Path(os.fsdecode(data.file.filename))
    patterns = {glob.escape(os.fsdecode(name)) for name, *_ in data.external or ()}
    for source in data.virtual_sources() if data.is_virtual else ():
        if source.file_name == ".":  # this file, in which the source may be behind a link
            yield str(path), description
        else:
            patterns |= {glob.escape(source.file_name), _virtual_pattern(source.file_name)}
    yield from _candidates(sorted(patterns), path, description)


def _virtual_pattern(name: str) -> str:
    """Return the pattern of the file names of a virtual dataset: %b is the number of a block."""
    parts = re.findall(r"%.|[^%]+|%", name, re.DOTALL)
    return "".join(
        "%" if part == "%%" else "*" if part[0] == "%" else glob.escape(part) for part in parts
    )


def _candidates(patterns: list[str], path: Path, referrer: str) -> Iterator[tuple[str, str]]:
    """Yield the existing files that HDF5 may open for file names in the file ``path``."""
    folders = [str(path.parent), str(path.resolve().parent), os.getcwd()]
    for variable in PREFIXES:
        folders += [
            prefix.replace("${ORIGIN}", folders[0])
            for prefix in os.environ.get(variable, "").split(":")
            if prefix
        ]
    for pattern in patterns:
        for folder in folders:
            # Of a file that does not exist, HDF5 also searches the last part of its name.
            for name in (pattern, os.path.basename(pattern)):
                place = os.path.join(glob.escape(folder), name)
                yield from ((file, referrer) for file in glob.iglob(place, include_hidden=True))
