"""Parquet, by pyarrow: columns of numbers, of lists of them, or of files' bytes, also as Hugging
Face's datasets has images."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ....security.files import InvalidFileError
from ....security.schema import parse_json
from ....security.text import printable
from ..source import Loaded, Source, by_magic, label_field
from . import damage_told, needed
from .stores import PAIRS

BATCH = 256  # rows that are decoded together


@dataclass
class Feature:
    """A column, as Hugging Face's datasets describes it."""

    names: list[str] = field(default_factory=list)


@dataclass
class Info:
    features: dict[str, Any] = field(default_factory=dict)


@dataclass
class HuggingFace:
    """The metadata of Hugging Face's datasets, as far as it is used."""

    info: Info = field(default_factory=Info)


class Columns(Source):
    """A file, or a folder of them. name, labels: columns. Read in its order, a batch of rows at a
    time."""

    in_order = True

    def __init__(self, path: Path, name: str, labels: str | None) -> None:
        super().__init__()
        self._parquet = needed("pyarrow.parquet", "pyarrow")
        self.told = str(path)
        self.paths = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        try:
            files = [self._parquet.ParquetFile(one) for one in self.paths]
        except (OSError, ValueError) as error:  # pyarrow's errors are these as well
            raise ValueError(f"{path}: is no Parquet that can be read: {error}") from None
        schema = files[0].schema_arrow
        self._count = int(sum(file.metadata.num_rows for file in files))
        names = schema.names
        usual = next(((x, y) for x, y in PAIRS if x in names), None)
        if not name and usual is None and len(names) != 1:
            raise ValueError(f"{path}: has {_some(names)}. HINT: {path}:COLUMN, --labels COLUMN")
        self._data = name or (usual[0] if usual else names[0])
        self._labels = labels or (usual[1] if not name and usual and usual[1] in names else "")
        for one in (self._data, self._labels):
            if one and one not in names:
                raise ValueError(f"{path}: has no column {one!r}; it has {_some(names)}")
        if not self._count:
            raise ValueError(f"{path}: holds no rows")
        first = next(iter(self.each()))
        if self._labels:
            whole = isinstance(first.label, int)
            self.label = "class"
            if not whole:
                self.label = label_field(first.label.dtype.name, first.label.shape, self.told)
            self.classes = _classes(schema, self._labels)
        self.kind = "arrays"
        if isinstance(first.data, bytes):
            self.kind = "files" if first.end == ".bin" else "images"

    def __len__(self) -> int:
        return self._count

    def load(self, i: int) -> Loaded:
        raise TypeError("rows come in their order")

    def each(self) -> Iterable[Loaded]:
        number = 0
        for path in self.paths:
            for batch in self._batches(path):
                with damage_told(path):
                    data = batch.column(self._data)
                    labels = batch.column(self._labels) if self._labels else [None] * len(data)
                for value, label in zip(data, labels, strict=True):
                    with damage_told(path):
                        loaded = self._loaded(value, label, f"{path}: row {number}")
                    yield loaded
                    number += 1
        if number != self._count:
            raise ValueError(f"{self.told}: has {number:,} rows of {self._count:,}")

    def _batches(self, path: Path) -> Iterator[Any]:
        columns = [one for one in (self._data, self._labels) if one]
        with damage_told(path):
            file = self._parquet.ParquetFile(path, page_checksum_verification=True)
            yield from file.iter_batches(BATCH, columns=columns)

    def _loaded(self, value: Any, label: Any, where: str) -> Loaded:
        told: Any = None
        if label is not None:
            array = _numbers(label, where)
            told = int(array) if not array.shape and array.dtype.kind in "iub" else array
        if hasattr(value, "keys"):  # {"bytes": ..., "path": ...}
            value = value["bytes"]
        if hasattr(value, "values") or not hasattr(value, "as_buffer"):
            return Loaded(_numbers(value, where), told)
        if not value.is_valid:
            raise ValueError(f"{where}: {self._data!r} is missing")
        content = value.as_buffer().to_pybytes()
        return Loaded(content, told, end=by_magic(content))


def source(path: Path, name: str, labels: str | None) -> Columns:
    return Columns(path, name, labels)


def _numbers(value: Any, where: str) -> np.ndarray[Any, Any]:
    """An array of a number, or of lists in lists, in their own dtype."""
    if not value.is_valid:
        raise ValueError(f"{where}: is missing")
    try:
        if not hasattr(value, "values"):
            return np.asarray(value.as_py(), value.type.to_pandas_dtype())
        if hasattr(value.values.type, "value_type"):
            return np.stack([_numbers(one, where) for one in value.values])
        made: np.ndarray[Any, Any] = value.values.to_numpy(zero_copy_only=False)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(f"{where}: is no array of numbers: {error}") from None
    return made


def _classes(schema: Any, column: str) -> list[str]:
    """Their names, where Hugging Face's datasets has written them down."""
    told = (schema.metadata or {}).get(b"huggingface", b"{}")
    try:
        found = parse_json(told, HuggingFace, "huggingface").info.features.get(column)
        return msgspec.convert(found, Feature).names if found else []
    except (InvalidFileError, msgspec.MsgspecError):  # their names are all that is lost
        return []


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
    return printable(", ".join(names[:10])) + more
