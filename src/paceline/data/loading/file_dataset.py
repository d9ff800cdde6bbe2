"""A folder of files that are not packed, as a dataset for Loader."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...security.removal import TemporaryFolder
from ..format.meta_schema import ArraySpec
from ..format.shard_format import DataError, label_spec
from ..packing.encode import load_array
from ..sources.folder_source import FolderSource
from ..sources.source import LoadedSample
from .unpacked_dataset import UnpackedDataset

Place = tuple[Path, int, int]  # file, offset and size in bytes


class Files(UnpackedDataset):
    """Dataset of the files in a folder, one sample per file.

    A file is opened for every sample that is read; packing the dataset avoids this. Images are
    arrays (height, width, channels), .npy files arrays, and files of other kinds bytes.

    Args:
        folder: Folder that contains one folder per class, or files.
        labels: CSV file of labels, same as for ``paceline pack``.
        follow_links: Whether to read files outside of the folder that links in it or ``labels``
            refer to.

    Raises:
        ValueError: The folder does not exist or contains no files.
        DataError: The folder can't be read.
    """

    _name = "Files"
    _source: FolderSource

    def __init__(
        self,
        folder: str | os.PathLike[str],
        labels: str | os.PathLike[str] | None = None,
        follow_links: bool = False,
    ) -> None:
        table = None if labels is None else os.fspath(labels)
        self._arguments = (os.fspath(folder), table, follow_links)
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(
                f"Files: {folder} is not a folder. HINT: pass a folder of sample files"
            )
        # The file list in the temporary folder stays open after the folder is removed.
        with TemporaryFolder() as work:
            self._source = FolderSource(
                self.folder, None if table is None else Path(table), work, follow_links
            )
        self.images, self.arrays = (self._source.kind == kind for kind in ("images", "arrays"))
        self.label = label_spec(self._source.label)

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return len(self._source.classes)

    def location(self, i: int) -> Place:
        """Return (file, offset, size in bytes) of a sample.

        Raises:
            DataError: The file is missing or can't be read.
        """
        path = self.folder / self._source.name(i)
        try:
            return path, 0, path.stat().st_size
        except OSError as error:
            raise DataError(path, -1, 0, f"can't be read: {error.strerror}") from None

    def spec_of(self, i: int) -> tuple[ArraySpec, ArraySpec | None]:
        """Return dtype and shape of a sample and of its label.

        Raises:
            ValueError: The file is of an unknown kind.
            DataError: The file can't be read.
        """
        array, _ = self.view(i, None)
        if isinstance(array, bytes):
            raise ValueError(
                f"{self.folder}: sample {i} is a file of unknown kind. "
                "HINT: Loader(..., transform=FUNCTION), which makes an array of the file's bytes"
            )
        return ArraySpec.of(array), self.label

    def stored(self, i: int) -> tuple[Any, Any]:
        """Return (array, label) without decoding images: the bytes of the file as uint8."""
        return self._made(i, lambda loaded: load_array(loaded) if self.arrays else _bytes(loaded))

    def view(self, i: int, scratch: Any) -> tuple[Any, Any]:
        """Return (array or bytes, label) of a sample.

        Raises:
            DataError: The file can't be read or decoded.
        """
        return self._made(i, load_array)

    def _made(self, i: int, make: Callable[[LoadedSample], Any]) -> tuple[Any, Any]:
        path = self.folder / self._source.name(i)
        try:
            loaded = self._source.load(i)
            self._source.check_kind(loaded)
            return make(loaded), loaded.label
        except OSError as error:
            raise DataError(path, -1, 0, f"can't be read: {error.strerror}") from None
        except (ValueError, ArithmeticError, MemoryError, EOFError) as error:
            raise DataError(path, -1, 0, str(error) or type(error).__name__) from None


def _bytes(loaded: LoadedSample) -> Any:
    return np.frombuffer(loaded.data, np.uint8)
