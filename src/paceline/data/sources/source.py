"""What can be packed: each kind knows how many samples it has, and gives any of them."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...security.text import printable
from ..format import npy
from ..format.meta_schema import DTYPES, MAX_DIMS, MAX_SAMPLE_BYTES
from ..format.shard_format import FILE, IMAGE, JPEG, ArraySpec
from ..shards import ScratchBuffer, Shards
from .bounded_read import OpenFile, read_at

JPEGS = (".jpg", ".jpeg", ".jpe")
IMAGES = (*JPEGS, ".png", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".ppm", ".pgm", ".jp2")
ARRAYS = (".npy",)
ENDS = {JPEG: ".jpg", IMAGE: ".png", FILE: ".bin"}  # what a packed sample is taken for
MAGIC = {b"\xff\xd8\xff": ".jpg", b"\x89PNG": ".png"}  # of a stream's


@dataclass
class Loaded:
    """One sample as it comes. data: an array, or a file's bytes. label: a class, or an array. end:
    what kind of file it is, as ".jpg"; by its name where it is not said."""

    data: Any
    label: Any = None
    name: str = ""
    end: str = ""

    def __post_init__(self) -> None:
        self.end = self.end or os.path.splitext(self.name)[1].lower()


class Source(ABC):
    """kind: "images", "arrays" or "files". label: None, "class", or what its arrays are. named:
    whether samples have names. in_order: whether it is only fast when it is read from its start,
    by ``each``. told: what it is, for people."""

    kind = "arrays"
    label: ArraySpec | str | None = None
    named = in_order = False
    told = ""

    def __init__(self) -> None:
        self.classes: list[str] = []
        self.notes: list[str] = []

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def load(self, i: int) -> Loaded:
        """A sample; by several threads. Raises OSError or ValueError."""

    def name(self, i: int) -> str:
        """A sample's, or ""."""
        return ""

    def each(self) -> Iterable[Loaded]:
        """All of them, in order."""
        return map(self.load, range(len(self)))

    def close(self) -> None:
        return None


class ArraySource(Source):
    """Arrays in memory or .npy files, whose first dim is the sample. Files are read a sample at a
    time."""

    def __init__(self, x: Any, y: Any = None) -> None:
        super().__init__()
        self.x = _rows(x)
        self.told = self.x.told
        self.kind = "images" if pictures(self.x.dtype, self.x.shape) else "arrays"
        self.y = None if y is None else _rows(y)
        if self.y is not None:
            if len(self.y) != len(self.x):
                raise ValueError(
                    f"{self.x.told} has {len(self.x):,} samples, and {self.y.told} "
                    f"{len(self.y):,} labels. HINT: as many of each"
                )
            whole = not self.y.shape and np.dtype(self.y.dtype).kind in "iu"
            self.label = "class" if whole else label_field(self.y.dtype, self.y.shape, self.y.told)

    def __len__(self) -> int:
        return len(self.x)

    def load(self, i: int) -> Loaded:
        label: Any = None if self.y is None else self.y.row(i)
        return Loaded(np.asarray(self.x.row(i)), int(label) if self.label == "class" else label)

    def close(self) -> None:
        for rows in (self.x, self.y):
            if rows is not None:
                rows.close()


def label_field(dtype: str, shape: tuple[int, ...], told: str) -> ArraySpec:
    """Return what labels that are arrays are. Raises ValueError for arrays a set can't hold."""
    if dtype not in DTYPES or len(shape) > MAX_DIMS:
        raise ValueError(
            f"{printable(told)}: labels that are {dtype} of {shape}, and no numbers of a usual "
            "kind. HINT: classes as 0, 1, 2 ..., or float32"
        )
    field = ArraySpec(dtype, shape)
    if field.nbytes > MAX_SAMPLE_BYTES:
        raise ValueError(f"{printable(told)}: labels of {dtype} {shape}: more than 4 GiB each")
    return field


def pictures(dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether arrays are images: bytes of (height, width, 1, 3 or 4)."""
    channels = (1, 3, 4)
    return (
        dtype == "uint8" and len(shape) == 3 and shape[2] in channels and shape[0] not in channels
    )


class _MemoryRows:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array, self.dtype, self.shape = array, array.dtype.name, array.shape[1:]
        self.told = f"an array of {array.dtype} {array.shape}"

    def __len__(self) -> int:
        return len(self.array)

    def row(self, i: int) -> Any:
        return self.array[i]

    def close(self) -> None:
        return None


class _FileRows:
    """A .npy file, read and not mapped: one that gets shorter is an error, and no signal."""

    def __init__(self, path: Path) -> None:
        self.told = str(path)
        self._file, head = _headed(path)
        self._count, self.shape = head.shape[0], head.shape[1:]
        self._kind, self.dtype = head.dtype, head.dtype.newbyteorder("=").name
        self._start, self._each = head.start, head.nbytes // max(head.shape[0], 1)

    def __len__(self) -> int:
        return self._count

    def row(self, i: int) -> Any:
        data = read_at(self._file.fd, self._each, self._start + i * self._each)
        if len(data) < self._each:
            raise ValueError(f"{self.told}: is truncated in sample {i}")
        array = np.frombuffer(data, self._kind).reshape(self.shape)
        return array.astype(self._kind.newbyteorder("="), copy=False)

    def close(self) -> None:
        self._file.close()


def _headed(path: Path) -> tuple[OpenFile, npy.Header]:
    """Open a .npy file of samples. Raises ValueError for what is none, or is cut."""
    try:
        opened = OpenFile(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    try:
        with open(opened.fd, "rb", closefd=False) as file:
            head = npy.read_header(file)
        size, least = os.fstat(opened.fd).st_size, head.start + head.nbytes
        if size < least:
            raise ValueError(
                f"is truncated: {size:,} bytes of at least {least:,}. HINT: copy it again"
            )
        alone = sum(side > 1 for side in head.shape) < 2  # then its order does not matter
        if not head.shape or (head.fortran and not alone):
            raise ValueError(
                f"{head.dtype} of {head.shape} is no C-ordered array of samples. "
                "HINT: np.save(path, np.ascontiguousarray(array))"
            )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return opened, head


def _rows(given: Any) -> Any:
    if hasattr(given, "row"):
        return given
    if isinstance(given, (str, os.PathLike)):
        return _FileRows(Path(given))
    array = np.asarray(given)
    if array.ndim < 1 or array.dtype.hasobject:
        raise ValueError(
            f"an array of {array.dtype} {array.shape} has no samples that can be packed"
        )
    return _MemoryRows(array)


class ShardSource(Source):
    """A packed set, to be packed in another way."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.shards = Shards(folder)
        meta = self.shards.meta
        self.kind, self.label, self.told = (
            meta.packed.get("kind", "arrays"),
            meta.label,
            str(folder),
        )
        self.classes, self.named = list(meta.classes), meta.names
        if self.named:
            self.shards.name(0)  # compares the checksum of all names

    def __len__(self) -> int:
        return len(self.shards)

    def load(self, i: int) -> Loaded:
        row, data, label = self.shards.read_raw(i, ScratchBuffer())
        if row.encoding in ENDS:
            return Loaded(bytes(data), label, self.name(i), ENDS[row.encoding])
        return Loaded(np.array(self.shards.decode_sample(i, row, data)), label, self.name(i))

    def name(self, i: int) -> str:
        return self.shards.name(i)


@dataclass
class _Stream:
    """Labels of a stream as they come: classes by name, numbers or arrays."""

    classes: dict[str, int] = field(default_factory=dict)
    label: ArraySpec | str | None = None
    seen: bool = False

    def taken(self, given: Any, number: int) -> Any:
        if isinstance(given, str):
            kind: ArraySpec | str | None = "class"
            made: Any = self.classes.setdefault(given, len(self.classes))
        elif given is None:
            kind = made = None
        else:
            array = np.asarray(given)
            if array.dtype.hasobject:
                raise ValueError(f"the label of sample {number} is a {type(given).__name__}")
            whole = not array.shape and array.dtype.kind in "iu"
            name = f"the label of sample {number}"
            kind = "class" if whole else label_field(array.dtype.name, array.shape, name)
            made = int(array) if whole else array
        if self.seen and kind != self.label:
            raise ValueError(
                f"the label of sample {number} is {_named(kind)}, and of those before it "
                f"{_named(self.label)}. HINT: labels of one kind and shape, or none at all"
            )
        self.label, self.seen = kind, True
        return made


class StreamSource(Source):
    """Anything that can be iterated: of arrays or bytes, or of (data, label). It is read once,
    from its start."""

    in_order = True

    def __init__(self, stream: Iterable[Any], told: str) -> None:
        super().__init__()
        self.told, self._stream, self._labels = told, stream, _Stream()

    def __len__(self) -> int:
        raise TypeError("a stream's length is not known")

    def load(self, i: int) -> Loaded:
        raise TypeError("a stream has an order of its own")

    def each(self) -> Iterable[Loaded]:
        for number, item in enumerate(self._stream):
            data, label = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
            end = ""
            if isinstance(data, (bytes, bytearray)):
                end = by_magic(data)
            else:
                data = np.asarray(data)
                if data.dtype.hasobject:
                    raise ValueError(f"{self.told}: sample {number} is a {type(item).__name__}")
            label = self._labels.taken(label, number)
            self.label, self.classes = self._labels.label, list(self._labels.classes)
            yield Loaded(data, label, end=end)


def by_magic(data: bytes | bytearray) -> str:
    """What kind of file bytes are: ".jpg", ".png", or ".bin" for any other."""
    return next((end for start, end in MAGIC.items() if data.startswith(start)), ".bin")


def _named(kind: ArraySpec | str | None) -> str:
    if isinstance(kind, ArraySpec):
        return f"{kind.dtype} of {kind.shape}"
    return "a class" if kind else "none"
