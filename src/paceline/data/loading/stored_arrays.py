"""HDF5, netCDF and zarr arrays as a dataset for Loader, without packing."""

import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from ..fork_locks import ForkSafeLock
from ..format.meta_schema import ArraySpec
from ..format.shard_format import DataError, label_spec
from ..sampling.samplers import BLOCK_BYTES, WINDOW, BlockShuffled
from ..shards import count_classes
from ..sources import formats
from ..sources.formats.stores import Rows, StoreSource
from ..sources.source import are_images
from .unpacked_dataset import UnpackedDataset

CACHE_BYTES = 256 << 20  # limit of the decompressed chunks in memory
STORES = ("hdf5", "netcdf", "zarr")


def is_stored_array(source: Any) -> bool:
    """Return whether ``source`` names an HDF5, netCDF or zarr file, or an array in one."""
    if not isinstance(source, (str, os.PathLike)):
        return False
    return formats.detect_format(formats.split_path(os.fspath(source))[0]) in STORES


class StoredArrays(UnpackedDataset):
    """Dataset of the rows of an array in an HDF5, netCDF or zarr file.

    Decompressed chunks that hold several samples are cached, up to CACHE_BYTES. So a chunk is
    decompressed once for samples that are read soon after each other. Each process opens the file
    again.

    Args:
        x: "FILE:ARRAY", or the name of the file if the choice of the array is unambiguous.
        y: Labels: the name of an array in the same file, "FILE:ARRAY", or a .npy file.
        follow_links: Whether to read files outside of the file's folder that it refers to.

    Raises:
        ValueError: The array is not numeric, or its samples differ in length.
        DataError: The file can't be read.
    """

    _name = "Stored"
    _source: StoreSource

    def __init__(
        self,
        x: str | os.PathLike[str],
        y: str | os.PathLike[str] | None = None,
        follow_links: bool = False,
    ) -> None:
        self._arguments = (os.fspath(x), None if y is None else os.fspath(y), follow_links)
        self._open_lock = ForkSafeLock()
        self._open()
        for note in self._source.notes:
            warnings.warn(f"Loader: {note}", stacklevel=3)
        rows = self._source.x
        if rows.dtype == "bytes" or rows.flat:
            raise ValueError(
                f"Loader: the samples of {rows.description} differ in length. HINT: "
                f"paceline pack {x} DEST"
            )
        self.array_spec = ArraySpec(rows.dtype, tuple(rows.shape))
        self.images = are_images(rows.dtype, self.array_spec.shape)
        self.label = label_spec(self._source.label)

    @property
    def chunk_samples(self) -> int:
        """Return the number of samples in a chunk."""
        return int(self._source.x.chunk)

    @property
    def kept(self) -> bool:
        """Return whether the cache holds the whole dataset decompressed."""
        return self.chunk_samples > 1 and len(self) * self.array_spec.nbytes <= CACHE_BYTES

    @property
    def path(self) -> Path:
        """Return the path of the file, or of the folder (zarr)."""
        return formats.split_path(self._arguments[0])[0]

    @property
    def classes(self) -> int:
        """Return the number of classes: the largest label + 1 if the classes have no names.

        Raises:
            DataError: There are more than MAX_CLASSES classes.
        """
        if self._source.classes:
            return len(self._source.classes)
        largest = int(max(map(self._label, range(len(self)))))
        return count_classes(largest, self._arguments[0])

    def spec_of(self, i: int) -> tuple[ArraySpec, ArraySpec | None]:
        """Return dtype and shape of the samples and of the labels."""
        return self.array_spec, self.label

    def view(self, i: int, scratch: Any) -> tuple[Any, Any]:
        """Return (array, label) of a sample.

        Raises:
            DataError: The sample can't be read.
        """
        return self._row(i), None if self.label is None else self._label(i)

    def read_part(self, i: int, part: Any, label_part: Any) -> tuple[Any, Any]:
        """Return parts of a sample and of its label; None for a part: all of it.

        Raises:
            DataError: The sample can't be read.
        """
        if part is None:
            array = self._row(i).copy()
        else:
            array = self._checked(i, lambda: self._source.x.read_part(i, part))
        if self.label is None:
            return array, None
        if label_part is None:
            return array, self._label(i)
        labels = self._labels
        if isinstance(labels, Rows):
            return array, self._checked(i, lambda: labels.read_part(i, label_part))
        return array, np.array(self._label(i)[label_part])

    def in_blocks(self, seed: int) -> BlockShuffled:
        """Return a shuffled order in which almost every chunk is decompressed only once."""
        each = max(self.array_spec.nbytes, 1)
        block = max(BLOCK_BYTES // each // self.chunk_samples, 1) * self.chunk_samples
        window = min(max(CACHE_BYTES // 2 // (block * each), 1), WINDOW)
        return BlockShuffled(len(self), block, seed, window)

    def fights(self) -> None:
        """Warn if shuffling single samples decompresses each chunk many times."""
        size = self.chunk_samples * self.array_spec.nbytes
        if self.chunk_samples > 1 and not self.kept:
            warnings.warn(
                f"Loader: {self._arguments[0]} has chunks of {self.chunk_samples} samples "
                f"({size:,} bytes). In random order, each chunk is decompressed for a single "
                "sample. "
                "HINT: shuffle='blocks', or paceline pack",
                stacklevel=4,
            )

    def _open(self) -> None:
        x, y, follow_links = self._arguments
        source = formats.open_source(*formats.split_path(x), y, follow_links)
        assert isinstance(source, StoreSource)
        self._source = source
        labels: Any = source.y
        if isinstance(labels, Rows):
            size = ArraySpec(labels.dtype, labels.shape).nbytes * len(labels)
            if size <= CACHE_BYTES:  # read once, not one chunk per sample
                labels = labels.read(0, len(labels))
        self._labels = labels
        self._lock = threading.Lock()
        self._chunks: OrderedDict[int, Future[Any]] = OrderedDict()
        self._process = os.getpid()  # last: other threads wait for it in _open_in_child

    def _open_in_child(self) -> None:
        """Open the file again in a forked process: processes must not share a file handle."""
        with self._open_lock:
            if self._process != os.getpid():
                self._open()

    def _row(self, i: int) -> Any:
        def read() -> Any:
            rows, size = self._source.x, self.chunk_samples
            return rows.row(i) if size == 1 else self._unpacked(rows, i // size)[i % size]

        return self._checked(i, read)

    def _checked(self, i: int, read: Callable[[], Any]) -> Any:
        """Read of a sample in this process.

        Raises:
            DataError: It can't be read.
        """
        if self._process != os.getpid():
            self._open_in_child()
        try:
            return read()
        except (OSError, ValueError, KeyError, ArithmeticError, MemoryError) as error:
            reason = str(error) or type(error).__name__
            raise DataError(self._arguments[0], -1, 0, f"sample {i}: {reason}") from None

    def _unpacked(self, rows: Rows, number: int) -> Any:
        """Return a chunk. The first thread that needs it reads it, and the others wait."""
        with self._lock:
            done = self._chunks.get(number)
            mine = done is None
            if done is None:
                done = self._chunks[number] = Future()
                most = max(CACHE_BYTES // (self.chunk_samples * max(self.array_spec.nbytes, 1)), 1)
                while len(self._chunks) > most:
                    self._chunks.popitem(last=False)
            self._chunks.move_to_end(number)
        if mine:
            first = number * self.chunk_samples
            try:
                done.set_result(rows.read(first, min(first + self.chunk_samples, len(self))))
            except BaseException as error:
                done.set_exception(error)
                with self._lock:
                    self._chunks.pop(number, None)
        return done.result()

    def _label(self, i: int) -> Any:
        if self._process != os.getpid():
            self._open_in_child()
        label = self._labels.row(i) if hasattr(self._labels, "row") else self._labels[i]
        return int(label) if self._source.label == "class" else np.asarray(label)
