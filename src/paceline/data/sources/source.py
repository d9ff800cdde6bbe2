"""Sources that can be packed: each has a number of samples and returns any of them by index."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...security.text import printable
from ..format import npy
from ..format.decode import image_to_array
from ..format.meta_schema import DTYPES, MAX_DIMS, MAX_SAMPLE_BYTES, ArraySpec
from ..format.shard_format import FILE, IMAGE, JPEG
from ..shards import ScratchBuffer, Shards
from .bounded_read import OpenFile, check_expansion, read_at
from .content import UNKNOWN, extension_of, kind_of

# How a sample of a kind is called.
ONE_OF = {"images": "an image", "arrays": "an array", "files": "no image and no array"}
EXTENSIONS = {JPEG: ".jpg", IMAGE: ".png", FILE: UNKNOWN}  # of a packed sample


@dataclass
class LoadedSample:
    """One sample of a source.

    Attributes:
        data: An array, or the bytes of a file.
        label: A class, an array, or None.
        extension: Kind of a file, as ".jpg"; by default that of the first bytes of ``data``, or of
            ``name``. "" for an array.
    """

    data: Any
    label: Any = None
    name: str = ""
    extension: str = ""

    def __post_init__(self) -> None:
        if not self.extension and not isinstance(self.data, np.ndarray):
            self.extension = extension_of(self.data, os.path.splitext(self.name)[1].lower())

    @property
    def kind(self) -> str:
        """Return "images", "arrays" or "files"."""
        if not isinstance(self.data, np.ndarray):
            return kind_of(self.extension)
        return "images" if are_images(self.data.dtype.name, self.data.shape) else "arrays"


class Source(ABC):
    """Samples to be packed.

    Attributes:
        kind: "images", "arrays" or "files".
        label: None, "class", or dtype and shape of label arrays.
        has_names: Whether samples have names.
        sequential: Whether it is only fast when read from its start, by ``each``.
        has_arrays: Whether samples are arrays, and not the bytes of files.
        description: What the source is, for messages.
        classes: Names of the classes.
        notes: Remarks for the user.
    """

    kind = "arrays"
    label: ArraySpec | str | None = None
    has_names = sequential = has_arrays = False
    description = ""

    def __init__(self) -> None:
        self.classes: list[str] = []
        self.notes: list[str] = []

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def load(self, i: int) -> LoadedSample:
        """Return a sample. Called by several threads. Raises OSError or ValueError."""

    def name(self, i: int) -> str:
        """Return the name of a sample, or ""."""
        return ""

    def each(self) -> Iterable[LoadedSample]:
        """Iterate over all samples in order."""
        return map(self.load, range(len(self)))

    def check_kind(self, loaded: LoadedSample) -> None:
        """Raise ValueError if a sample is not of the kind that the source has."""
        is_array = isinstance(loaded.data, np.ndarray)
        if is_array != self.has_arrays or not (is_array or loaded.kind == self.kind):
            raise self._other_kind(loaded)

    def _other_kind(self, loaded: LoadedSample) -> ValueError:
        return ValueError(
            f"is {ONE_OF[loaded.kind]}, but others are {self.kind}. HINT: pack each kind as a "
            "dataset of its own, or use MODULE:FUNCTION as SOURCE"
        )

    def close(self) -> None:
        return None


class ArraySource(Source):
    """Arrays in memory or .npy files, whose first dim is the sample. Files are read sample by
    sample."""

    def __init__(self, x: Any, y: Any = None) -> None:
        super().__init__()
        self.x = _rows(x)
        self.description = self.x.description
        self.kind = "images" if are_images(self.x.dtype, self.x.shape) else "arrays"
        self.has_arrays = True
        self.y = None if y is None else _rows(y)
        if self.y is not None:
            if len(self.y) != len(self.x):
                raise ValueError(
                    f"{self.x.description} has {len(self.x):,} samples, but {self.y.description} "
                    f"has {len(self.y):,} labels. HINT: pass one label per sample"
                )
            whole = not self.y.shape and np.dtype(self.y.dtype).kind in "iu"
            self.label = (
                "class" if whole else label_field(self.y.dtype, self.y.shape, self.y.description)
            )

    def __len__(self) -> int:
        return len(self.x)

    def load(self, i: int) -> LoadedSample:
        label: Any = None if self.y is None else self.y.row(i)
        return LoadedSample(
            np.asarray(self.x.row(i)), int(label) if self.label == "class" else label
        )

    def close(self) -> None:
        for rows in (self.x, self.y):
            if rows is not None:
                rows.close()


def label_field(dtype: str, shape: tuple[int, ...], description: str) -> ArraySpec:
    """Return dtype and shape of array labels. Raises ValueError if a dataset can't hold them."""
    if dtype not in DTYPES or len(shape) > MAX_DIMS:
        raise ValueError(
            f"{printable(description)}: labels of {dtype} {shape} are not supported. HINT: "
            "use classes 0, 1, 2 ..., or float32"
        )
    field = ArraySpec(dtype, shape)
    if field.nbytes > MAX_SAMPLE_BYTES:
        raise ValueError(
            f"{printable(description)}: labels of {dtype} {shape} have more than 4 GiB each"
        )
    return field


def are_images(dtype: str, shape: tuple[int, ...]) -> bool:
    """Return whether arrays are images: uint8 of (height, width, 1, 3 or 4)."""
    channels = (1, 3, 4)
    return (
        dtype == "uint8" and len(shape) == 3 and shape[2] in channels and shape[0] not in channels
    )


class _MemoryRows:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array, self.dtype, self.shape = array, array.dtype.name, array.shape[1:]
        self.description = f"an array of {array.dtype} {array.shape}"

    def __len__(self) -> int:
        return len(self.array)

    def row(self, i: int) -> Any:
        return self.array[i]

    def close(self) -> None:
        return None


class _FileRows:
    """A .npy file, read and not mapped: if the file is truncated meanwhile, reading raises an error
    instead of a signal."""

    def __init__(self, path: Path) -> None:
        self.description = str(path)
        self._file, head = _open_npy(path)
        self._count, self.shape = head.shape[0], head.shape[1:]
        self._file_dtype, self.dtype = head.dtype, head.dtype.newbyteorder("=").name
        self._start, self._row_bytes = head.start, head.nbytes // max(head.shape[0], 1)
        stored_bytes = os.fstat(self._file.fd).st_size
        check_expansion(self.description, self._count, self._row_bytes, lambda: stored_bytes)

    def __len__(self) -> int:
        return self._count

    def row(self, i: int) -> Any:
        data = read_at(self._file.fd, self._row_bytes, self._start + i * self._row_bytes)
        if len(data) < self._row_bytes:
            raise ValueError(f"{self.description} is truncated in sample {i}")
        array = np.frombuffer(data, self._file_dtype).reshape(self.shape)
        return array.astype(self._file_dtype.newbyteorder("="), copy=False)

    def close(self) -> None:
        self._file.close()


def _open_npy(path: Path) -> tuple[OpenFile, npy.Header]:
    """Open a .npy file of samples and read its header. Raises ValueError if it is not one or is
    truncated."""
    try:
        opened = OpenFile(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    try:
        with open(opened.fd, "rb", closefd=False) as file:
            head = npy.read_header(file)
        size, min_size = os.fstat(opened.fd).st_size, head.start + head.nbytes
        if size < min_size:
            raise ValueError(
                f"is truncated: {size:,} bytes of at least {min_size:,}. HINT: copy it again"
            )
        # With at most one side above 1, C and Fortran order are the same.
        order_irrelevant = sum(side > 1 for side in head.shape) < 2
        if not head.shape or (head.fortran and not order_irrelevant):
            raise ValueError(
                f"{head.dtype} of {head.shape} is not a C-ordered array of samples. "
                "HINT: np.save(path, np.ascontiguousarray(array))"
            )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return opened, head


def _rows(value: Any) -> Any:
    if hasattr(value, "row"):
        return value
    if isinstance(value, (str, os.PathLike)):
        return _FileRows(Path(value))
    array = np.asarray(value)
    if array.ndim < 1 or array.dtype.hasobject:
        raise ValueError(
            f"an array of {array.dtype} {array.shape} has no samples that can be packed"
        )
    return _MemoryRows(array)


class ShardSource(Source):
    """A packed dataset, to be packed in another way."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.shards = Shards(folder)
        meta = self.shards.meta
        self.kind, self.label = meta.packed.get("kind", "arrays"), meta.label
        self.description = str(folder)
        self.classes, self.has_names = list(meta.classes), meta.names
        if self.has_names:
            self.shards.name(0)  # checks the checksum of all names

    def __len__(self) -> int:
        return len(self.shards)

    def load(self, i: int) -> LoadedSample:
        row, data, label = self.shards.read_raw(i, ScratchBuffer())
        if row.encoding in EXTENSIONS:
            return LoadedSample(bytes(data), label, self.name(i), EXTENSIONS[row.encoding])
        return LoadedSample(np.array(self.shards.decode_sample(i, row, data)), label, self.name(i))

    def name(self, i: int) -> str:
        return self.shards.name(i)

    def check_kind(self, loaded: LoadedSample) -> None:
        """Do nothing: the samples were checked when they were packed."""


@dataclass
class _LabelConverter:
    """Convert labels of a stream: class names to numbers, others to integers or arrays."""

    classes: dict[str, int] = field(default_factory=dict)
    label: ArraySpec | str | None = None
    seen: bool = False

    def convert(self, value: Any, number: int) -> Any:
        if isinstance(value, str):
            kind: ArraySpec | str | None = "class"
            result: Any = self.classes.get(value, len(self.classes))
        elif value is None:
            kind = result = None
        else:
            array = np.asarray(value)
            if array.dtype.hasobject:
                raise ValueError(
                    f"the label of sample {number} is a {type(value).__name__}. HINT: yield "
                    "numbers, arrays or class names as labels"
                )
            whole = not array.shape and array.dtype.kind in "iu"
            name = f"the label of sample {number}"
            kind = "class" if whole else label_field(array.dtype.name, array.shape, name)
            result = int(array) if whole else array
        if self.seen and kind != self.label:
            raise ValueError(
                f"the label of sample {number} is {_label_name(kind)}, but earlier labels are "
                f"{_label_name(self.label)}. HINT: yield labels of one kind and shape, or no labels"
            )
        if self.seen and isinstance(value, str) != bool(self.classes):
            raise ValueError(
                f"the label of sample {number} is {value!r}, but earlier labels are "
                f"{'names' if self.classes else 'numbers'} of classes. HINT: yield names only, or "
                "numbers only"
            )
        self.label, self.seen = kind, True
        if isinstance(value, str):
            self.classes[value] = result
        return result


class StreamSource(Source):
    """Any iterable of arrays, PIL images or bytes, or of (data, label). It is read once, from its
    start."""

    sequential = True

    def __init__(self, stream: Iterable[Any], description: str) -> None:
        super().__init__()
        self.description, self._stream, self._labels = description, stream, _LabelConverter()

    def __len__(self) -> int:
        raise TypeError("the length of a stream is unknown")

    def load(self, i: int) -> LoadedSample:
        raise TypeError("a stream can only be read in order")

    def each(self) -> Iterable[LoadedSample]:
        for number, item in enumerate(self._stream):
            data, label = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
            if isinstance(data, (bytearray, memoryview)):
                data = bytes(data)
            if hasattr(data, "getpalette"):  # PIL: as an array, it could be indices of colours
                data = image_to_array(data)
            if not isinstance(data, bytes):
                data = np.asarray(data)
                if data.dtype.hasobject:
                    raise ValueError(
                        f"{self.description}: sample {number} is a {type(item).__name__}. HINT: "
                        "yield arrays or bytes"
                    )
            label = self._labels.convert(label, number)
            self.label, self.classes = self._labels.label, list(self._labels.classes)
            loaded = LoadedSample(data, label)
            if not number:
                self.kind, self.has_arrays = loaded.kind, not isinstance(data, bytes)
            yield loaded

    def check_kind(self, loaded: LoadedSample) -> None:
        super().check_kind(loaded)
        if loaded.kind != self.kind:  # arrays that are images, and others
            raise self._other_kind(loaded)


def _label_name(kind: ArraySpec | str | None) -> str:
    if isinstance(kind, ArraySpec):
        return f"{kind.dtype} of {kind.shape}"
    return "a class" if kind else "none"
