"""Named arrays in a file: what HDF5, netCDF and Zarr have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ....security.text import printable
from ...boundary import Boundary
from ...format.meta_schema import DTYPES, MAX_DIMS, MAX_SAMPLE_BYTES, ArraySpec
from ..bounded_read import check_expansion
from ..source import ArraySource, LoadedSample
from . import open_source as open_formats_source
from . import split_path

# Names of samples and labels that are looked for by default.
PAIRS = (
    ("x", "y"),
    ("image", "label"),
    ("images", "labels"),
    ("data", "label"),
    ("data", "labels"),
    ("input", "target"),
    ("inputs", "targets"),
)
READ_BYTES = 64 << 20  # of rows read at once
Array = np.ndarray[Any, Any]


class Rows(ABC):
    """An array on disk, whose first dim is the sample. Read by several threads.

    Attributes:
        chunk: Number of samples that can only be read together; 1 if each can be read alone.
        dtype: Name of a number's dtype, or "bytes" if samples are files' bytes.
        flat: Whether samples of different shapes are stored as vectors.
        note: Remark for the user, or "".
    """

    description = ""
    dtype = note = ""
    shape: tuple[int, ...] = ()
    chunk = 1
    flat = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, first: int, end: int) -> Array:
        """Return rows ``first`` to ``end``, in native byte order. Raises OSError or ValueError."""

    def row(self, i: int) -> Any:
        return self.read(i, i + 1)[0]

    def read_part(self, i: int, part: tuple[slice, ...]) -> Array:
        """Return a hyperslab of row ``i``; other rows of its chunk are not decompressed.

        Raises OSError or ValueError.
        """
        hyperslab: Array = self.row(i)[part]
        return hyperslab

    def close(self) -> None:
        return None


class StackedRows(Rows):
    """Several arrays of one shape, stacked as channels."""

    def __init__(self, parts: list[Rows]) -> None:
        first, self.parts = parts[0], parts
        for other in parts[1:]:
            if (len(other), other.shape, other.dtype) != (len(first), first.shape, first.dtype):
                raise ValueError(
                    f"{other.description} is {other.dtype} {(len(other), *other.shape)}, and "
                    f"{first.description} {first.dtype} {(len(first), *first.shape)}. HINT: "
                    "name arrays of one shape and dtype, or a single array"
                )
        self.description = ", ".join(part.description for part in parts)
        self.dtype, self.shape = first.dtype, (len(parts), *first.shape)
        self.chunk = max(part.chunk for part in parts)
        self.note = "; ".join(part.note for part in parts if part.note)

    def __len__(self) -> int:
        return len(self.parts[0])

    def read(self, first: int, end: int) -> Array:
        return np.stack([part.read(first, end) for part in self.parts], axis=1)

    def read_part(self, i: int, part: tuple[slice, ...]) -> Array:
        return np.stack([rows.read_part(i, part[1:]) for rows in self.parts[part[0]]])

    def close(self) -> None:
        for part in self.parts:
            part.close()


class StoreSource(ArraySource):
    """Rows of samples and optionally of labels and names."""

    def __init__(self, x: Rows, y: Any = None, names: Rows | None = None) -> None:
        if isinstance(y, Rows) and y.dtype == "bytes":
            raise ValueError(
                f"{y.description}: labels must be numbers. HINT: use classes 0, 1, 2 ..."
            )
        super().__init__(x, y)
        self.sequential = x.chunk > 1
        self.notes += [rows.note for rows in (x, y) if isinstance(rows, Rows) and rows.note]
        self.has_names, self._names = names is not None, names
        if x.dtype == "bytes":
            self.kind, self.has_arrays = (self.load(0).kind if len(x) else "files"), False

    def load(self, i: int) -> LoadedSample:
        loaded = super().load(i)
        return self._loaded(loaded.data, loaded.label, self.name(i))

    def name(self, i: int) -> str:
        return _text(self._names.row(i)) if self._names is not None else ""

    def each(self) -> Iterable[LoadedSample]:
        """Iterate in storage order, so that each chunk is read once."""
        size = np.dtype(self.x.dtype).itemsize if self.x.dtype != "bytes" else 1
        each = max(int(np.prod(self.x.shape, dtype=np.int64)) * size, 1)
        step = max(READ_BYTES // each // self.x.chunk, 1) * self.x.chunk
        for first in range(0, len(self.x), step):
            end = min(first + step, len(self.x))
            rows = self.x.read(first, end)
            labels = self.y.read(first, end) if isinstance(self.y, Rows) else None
            for i, data in enumerate(rows, first):
                label: Any = None
                if self.y is not None:
                    label = self.y.row(i) if labels is None else labels[i - first]
                label = int(label) if self.label == "class" else label
                yield self._loaded(data, label, self.name(i))

    def close(self) -> None:
        super().close()
        if self._names is not None:
            self._names.close()

    def _loaded(self, data: Any, label: Any, name: str) -> LoadedSample:
        # A scalar becomes an array.
        return LoadedSample(
            bytes(data) if self.x.dtype == "bytes" else np.asarray(data), label, name
        )


RowsOpener = Callable[[Path, str], Rows]


def source(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    name: str,
    labels: str | None,
    open_rows: RowsOpener,
    boundary: Boundary,
) -> StoreSource:
    """Open arrays of a file, given the names and shapes of all its arrays."""
    names, label = choose_arrays(path, shapes, name, labels)
    parts = [open_rows(path, array) for array in names]
    y: Any = label
    if label is not None and label in shapes:
        y = open_rows(path, label)
    elif label is not None and split_path(label)[1]:
        found = open_formats_source(*split_path(label), None, boundary.follow_links)
        if not isinstance(found, StoreSource):
            raise ValueError(f"{label} contains no array of labels")
        y = found.x
    named = open_rows(path, "names") if "names" in shapes and "names" not in names else None
    return StoreSource(parts[0] if len(parts) == 1 else StackedRows(parts), y, named)


def choose_arrays(
    path: Path, shapes: Mapping[str, tuple[int, ...]], name: str, labels: str | None
) -> tuple[list[str], str | None]:
    """Return the names of the sample arrays and of the label array (possibly another file)."""
    if not name:
        for x, y in PAIRS:
            if x in shapes:
                name = x
                labels = y if labels is None and y in shapes else labels
                break
        else:
            if len(shapes) != 1:
                raise ValueError(
                    f"{path}: {_list_arrays(shapes)}. HINT: {path}:NAME, and --labels NAME"
                )
            name = next(iter(shapes))
    names = name.split(",")
    for array in names:
        if array not in shapes:
            raise ValueError(f"{path} has no {array!r}; {_list_arrays(shapes)}. HINT: {path}:NAME")
        if not shapes[array]:
            raise ValueError(f"{path}: {array!r} is a scalar. HINT: name an array of samples")
    if labels is not None and labels not in shapes and not split_path(labels)[0].exists():
        raise ValueError(f"{path} has no {labels!r}; {_list_arrays(shapes)}. HINT: --labels NAME")
    return names, labels


def native(array: Any, description: str) -> Array:
    """Return an array of numbers in native byte order."""
    values = np.asarray(array)
    if values.dtype.kind not in "biufc":
        raise ValueError(f"{description} has the dtype {values.dtype}, which is not numeric")
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def field_of(dtype: Any, shape: tuple[int, ...], description: str) -> ArraySpec:
    """Return dtype and shape of a row. Raises ValueError if they are not those of numbers."""
    name = np.dtype(dtype).newbyteorder("=").name
    if name not in DTYPES or len(shape) > MAX_DIMS:
        raise ValueError(
            f"{printable(description)} is {printable(str(dtype))[:80]} of {shape[:MAX_DIMS]}, "
            "which is not a numeric array. HINT: name another array: FILE:ARRAY, or use "
            "MODULE:FUNCTION as SOURCE"
        )
    return ArraySpec(name, tuple(int(side) for side in shape[1:]))


def check_sizes(rows: "Rows", stored_bytes: Callable[[], int]) -> None:
    """Check the size of what is read at once, a row or all rows of a chunk, before memory is
    allocated for it, and that of all rows.

    Args:
        stored_bytes: Returns the size of all rows on disk.

    Raises:
        ValueError: A row or chunk has more than 4 GiB, or all rows are too large for what is stored
            of them.
    """
    variable = rows.dtype == "bytes" or rows.flat
    row = 0 if variable else ArraySpec(rows.dtype, tuple(rows.shape)).nbytes
    at_once = row * max(min(rows.chunk, len(rows)), 1)
    if at_once > MAX_SAMPLE_BYTES:
        raise ValueError(
            f"{printable(rows.description)}: its rows are {rows.dtype} of {tuple(rows.shape)}, and "
            f"a chunk has {rows.chunk:,} of them: {at_once:,} bytes are read at once. HINT: use "
            "smaller chunks along the first dimension, or patches"
        )
    check_expansion(rows.description, len(rows), row, stored_bytes)


def missing_chunks(description: str, stored: int, expected: int) -> str:
    """Return a note about chunks that are missing, or ""."""
    if stored >= expected:
        return ""
    return (
        f"{description}: {expected - stored:,} of {expected:,} chunks are missing, and are read as "
        "fill values"
    )


def _list_arrays(shapes: Mapping[str, tuple[int, ...]]) -> str:
    some = [printable(f"{name} {shape}") for name, shape in list(shapes.items())[:10]]
    more = f" and {len(shapes) - 10:,} more" if len(shapes) > 10 else ""
    return f"it has {', '.join(some)}{more}" if some else "it has no arrays"


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
