"""Parquet with pyarrow: columns of numbers, of (nested) lists of numbers, or of files' bytes, also
as Hugging Face's datasets stores images."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ....security.files import InvalidFileError
from ....security.schema import parse_json
from ....security.text import printable
from ...boundary import Boundary
from ..bounded_read import check_expansion
from ..source import LoadedSample, Source, label_field
from . import check_compression, convert_library_errors, data_files, import_format_package
from .stores import PAIRS

BATCH_ROWS = 256  # decoded together


@dataclass
class Feature:
    """Description of a column in the metadata of Hugging Face's datasets."""

    names: list[str] = field(default_factory=list)


@dataclass
class Info:
    features: dict[str, Any] = field(default_factory=dict)


@dataclass
class HuggingFaceMetadata:
    """Metadata of Hugging Face's datasets, as far as it is used."""

    info: Info = field(default_factory=Info)


class ParquetSource(Source):
    """A Parquet file, or a folder of them. name, labels: columns. Read in order, a batch of rows at
    a time."""

    sequential = True

    def __init__(self, path: Path, name: str, labels: str | None) -> None:
        super().__init__()
        self._parquet = import_format_package("pyarrow.parquet", "pyarrow")
        self.description = str(path)
        self.paths = data_files(path)
        files = [self._open(file) for file in self.paths]
        schema = files[0].schema_arrow
        self._count = int(sum(file.metadata.num_rows for file in files))
        stored_bytes = sum(file.stat().st_size for file in self.paths)
        check_expansion(self.description, self._count, 0, lambda: stored_bytes)
        names = schema.names
        default_columns = next(((x, y) for x, y in PAIRS if x in names), None)
        if not name and default_columns is None and len(names) != 1:
            raise ValueError(
                f"{path} has {_list_columns(names)}. HINT: {path}:COLUMN, --labels COLUMN"
            )
        x, y = default_columns or (next(iter(names), ""), "")
        self._data = name or x
        self._labels = labels or (y if not name and y in names else "")
        for column in (self._data, self._labels):
            if column and column not in names:
                raise ValueError(f"{path} has no column {column!r}; it has {_list_columns(names)}")
        if not self._count:
            raise ValueError(f"{path} contains no rows")
        for place, file in zip(self.paths, files, strict=True):
            self._check_columns(place, file.schema_arrow, schema)
        first = next(iter(self.each()))
        if self._labels:
            whole = isinstance(first.label, int)
            self.label = "class"
            if not whole:
                self.label = label_field(
                    first.label.dtype.name, first.label.shape, self.description
                )
            self.classes = _classes(schema, self._labels)
        self.kind, self.has_arrays = first.kind, not isinstance(first.data, bytes)

    def _open(self, path: Path) -> Any:
        try:
            return self._parquet.ParquetFile(path)
        except (OSError, ValueError) as error:  # pyarrow's errors are subclasses of these
            check_compression(path)
            raise ValueError(f"{path} can't be read as Parquet: {error}") from None

    def _check_columns(self, path: Path, schema: Any, first: Any) -> None:
        """Check that the columns of a file have the types that they have in the first one."""
        for name in filter(None, (self._data, self._labels)):
            kind = str(schema.field(name).type) if name in schema.names else "missing"
            wanted = str(first.field(name).type)
            if kind.replace("large_", "") != wanted.replace("large_", ""):
                raise ValueError(
                    printable(f"{path}: the column {name} is {kind}, and {wanted} in ")
                    + f"{self.paths[0]}. HINT: write all files with one schema, or pack each alone"
                )

    def __len__(self) -> int:
        return self._count

    def load(self, i: int) -> LoadedSample:
        raise TypeError("rows can only be read in order")

    def each(self) -> Iterable[LoadedSample]:
        number = 0
        for path in self.paths:
            for batch in self._batches(path):
                with convert_library_errors(path):
                    data = batch.column(self._data)
                    labels = batch.column(self._labels) if self._labels else [None] * len(data)
                for value, label in zip(data, labels, strict=True):
                    with convert_library_errors(path):
                        loaded = self._loaded(value, label, f"{path}: row {number}")
                    yield loaded
                    number += 1
        if number != self._count:
            raise ValueError(f"{self.description} has {number:,} rows of {self._count:,}")

    def _batches(self, path: Path) -> Iterator[Any]:
        columns = [column for column in (self._data, self._labels) if column]
        with convert_library_errors(path):
            file = self._parquet.ParquetFile(path, page_checksum_verification=True)
            yield from file.iter_batches(BATCH_ROWS, columns=columns)

    def _loaded(self, value: Any, label: Any, where: str) -> LoadedSample:
        label_value: Any = None
        if label is not None:
            array = _numbers(label, where)
            label_value = int(array) if not array.shape and array.dtype.kind in "iub" else array
        if hasattr(value, "keys"):  # {"bytes": ..., "path": ...}
            value = value["bytes"]
        if hasattr(value, "values") or not hasattr(value, "as_buffer"):
            return LoadedSample(_numbers(value, where), label_value)
        if not value.is_valid:
            raise ValueError(f"{where}: {self._data!r} is missing")
        return LoadedSample(value.as_buffer().to_pybytes(), label_value)


def source(path: Path, name: str, labels: str | None, boundary: Boundary) -> ParquetSource:
    return ParquetSource(path, name, labels)


def _numbers(value: Any, where: str) -> np.ndarray[Any, Any]:
    """Return an array of a number or of nested lists, in their dtype."""
    if not value.is_valid:
        raise ValueError(f"{where} is missing")
    try:
        if not hasattr(value, "values"):
            return np.asarray(value.as_py(), value.type.to_pandas_dtype())
        if hasattr(value.values.type, "value_type"):
            return np.stack([_numbers(row, where) for row in value.values])
        numbers = value.values
        types = import_format_package("pyarrow.types", "pyarrow")
        if numbers.null_count and not types.is_floating(numbers.type):
            raise ValueError(f"a value is missing, and {numbers.type} has no NaN")
        made: np.ndarray[Any, Any] = numbers.to_numpy(zero_copy_only=False)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(f"{where} is not a numeric array: {error}") from None
    return made


def _classes(schema: Any, column: str) -> list[str]:
    """Return class names, if Hugging Face's datasets has stored them."""
    metadata = (schema.metadata or {}).get(b"huggingface", b"{}")
    try:
        found = parse_json(metadata, HuggingFaceMetadata, "huggingface").info.features.get(column)
        return msgspec.convert(found, Feature).names if found else []
    except (InvalidFileError, msgspec.MsgspecError):  # only the class names are lost
        return []


def _list_columns(names: list[str]) -> str:
    more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
    return printable(", ".join(names[:10])) + more
