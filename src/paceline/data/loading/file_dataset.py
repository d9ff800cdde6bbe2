"""A folder of files as a Loader's source, before it is packed."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..format.shard_format import ArraySpec, DataError
from ..packing.encode import load_array
from ..shards import RaggedError
from ..sources.folder_source import FolderSource
from ..sources.source import LoadedSample

Place = tuple[Path, int, int]  # file, offset, bytes


class Files:
    """folder: class folders, or files; labels: a CSV, as ``paceline pack`` takes it.

    Each sample is a file that is opened when it is its turn: what packing spares. Images are
    (height, width, channels), .npy files arrays, files of other kinds bytes. Raises ValueError for
    a folder without files, DataError for one that can't be read.
    """

    def __init__(
        self, folder: str | os.PathLike[str], labels: str | os.PathLike[str] | None = None
    ) -> None:
        self._told = (os.fspath(folder), None if labels is None else os.fspath(labels))
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"Files: {folder} is no folder. HINT: one that holds files of samples")
        with tempfile.TemporaryDirectory(prefix="paceline-") as work:  # its list stays open
            table = None if labels is None else Path(labels)
            self._source = FolderSource(self.folder, table, Path(work))
        self.images, self.arrays = (self._source.kind == kind for kind in ("images", "arrays"))
        told = self._source.label
        self.label = (
            told if isinstance(told, ArraySpec) else ArraySpec("int64", ()) if told else None
        )

    def __len__(self) -> int:
        return len(self._source)

    def __repr__(self) -> str:
        return f"Files({self._told[0]!r}): {len(self):,} samples"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._told

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        array, label = self.read(i, None)
        return array if self.label is None else (array, label)

    @property
    def classes(self) -> int:
        """How many there are."""
        return len(self._source.classes)

    def location(self, i: int) -> Place:
        """Where a sample lies. Raises DataError where it is gone."""
        path = self.folder / self._source.name(i)
        try:
            return path, 0, path.stat().st_size
        except OSError as error:
            raise DataError(path, -1, 0, f"can't be read: {error.strerror}") from None

    def spec_of(self, i: int) -> tuple[ArraySpec, ArraySpec | None]:
        """What a sample and its label are."""
        array, _ = self.read(i, None)
        if isinstance(array, bytes):
            raise ValueError(
                f"{self.folder}: sample {i} is a file of a kind that is not known. "
                "HINT: Loader(..., transform=...) that makes an array of its bytes"
            )
        return ArraySpec(array.dtype.name, array.shape), self.label

    def read(self, i: int, scratch: Any) -> tuple[Any, Any]:
        """(array or bytes, label); arrays that can be written to."""
        array, label = self._decoded(i)
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            array = array.copy()
        return array, label

    def stored(self, i: int) -> tuple[Any, Any]:
        """(array, label): a .npy file's, or the file's bytes as uint8."""
        return self._made(i, lambda loaded: load_array(loaded) if self.arrays else _bytes(loaded))

    def _decoded(self, i: int) -> tuple[Any, Any]:
        return self._made(i, load_array)

    def _made(self, i: int, make: Callable[[LoadedSample], Any]) -> tuple[Any, Any]:
        path = self.folder / self._source.name(i)
        try:
            loaded = self._source.load(i)
            return make(loaded), loaded.label
        except OSError as error:
            raise DataError(path, -1, 0, f"can't be read: {error.strerror}") from None
        except (ValueError, ArithmeticError, MemoryError, EOFError) as error:
            raise DataError(path, -1, 0, str(error) or type(error).__name__) from None

    def read_into(self, i: int, arrays: Any, labels: Any, k: int, scratch: Any) -> None:
        """A sample to ``arrays[k]``, its label to ``labels[k]``."""
        array, label = self._decoded(i)
        if array.shape != arrays.shape[1:] or array.dtype != arrays.dtype:
            raise RaggedError(i, ArraySpec(array.dtype.name, array.shape))
        arrays[k] = array
        if label is not None:
            labels[k] = label


def _bytes(loaded: LoadedSample) -> Any:
    return np.frombuffer(loaded.data, np.uint8)
