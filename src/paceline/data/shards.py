"""Read a packed dataset: random access by several threads, with a checksum for each sample."""

import contextlib
import errno
import os
import resource
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..plurals import counted
from ..security.files import InvalidFileError, open_regular
from .fork_locks import ForkSafeLock
from .format import shard_format
from .format.decode import decode, read_part
from .format.meta_schema import MAX_SAMPLE_BYTES, ArraySpec, DatasetMeta, nbytes
from .format.sample_names import SampleNames
from .format.shard_format import (
    FILE,
    IMAGE,
    INDEX_FILE,
    JPEG,
    META_FILE,
    NAMES_FILE,
    RAW,
    DataError,
    IndexRow,
)
from .staging.fetch_shards import whole
from .staging.staged_sets import open_staged_here

VERIFIED_TOGETHER = 64  # samples that a thread of ``verify`` reads at a time
PIECE_BYTES = 1 << 20  # of a file that is read as a whole
CHANGED = "a byte has changed (its checksum differs)"
MAX_CLASSES = 1 << 24
ROW_BYTES = shard_format.ROW_STRUCT.size
LOOK_S = 5.0  # interval between two checks whether a shard has been staged


# Check that the array in a row of the index is valid in the dataset, before memory is allocated.
#
# The checksum of a row detects corruption. It does not authenticate the row.


def make_row_check(meta: DatasetMeta) -> Callable[[IndexRow], None]:
    """Return a function that checks one row of the index.

    The function raises ValueError if the row contradicts paceline.json or the length of its sample.
    """
    alike, tail = meta.array, meta.tail
    sizes = [shard.bytes for shard in meta.shards]
    count = len(sizes)
    shape, dtype = (alike.shape, alike.dtype) if alike else ((), "")
    raw_bytes = alike.nbytes + tail if alike else -1

    def check(row: IndexRow) -> None:
        _, offset, length, shard, own_shape, own_dtype, encoding, _, _ = row  # faster than names
        if shard >= count or offset + length > sizes[shard]:
            raise ValueError("its row is damaged")
        if encoding == RAW and length == raw_bytes and own_shape == shape and own_dtype == dtype:
            return
        if alike is not None and (own_shape != shape or own_dtype != dtype):
            raise ValueError(
                f"its row says {own_dtype} of {own_shape}, but {META_FILE} says {dtype} of {shape}"
            )
        _check_sizes(row, tail)

    return check


def _check_sizes(row: IndexRow, tail: int) -> None:
    """Compare the array size of a row with the length of its sample and with the limits.

    Args:
        row: Row of the index.
        tail: Size of the label in bytes.
    """
    shape, size = row.shape, nbytes(row.dtype, row.shape)
    if size > MAX_SAMPLE_BYTES:
        raise ValueError(f"its row says {row.dtype} of {shape}, larger than 4 GiB")
    if row.encoding == RAW and row.length != size + tail:
        raise ValueError(f"its row is damaged: it has {row.length:,} bytes of {size + tail:,}")
    if row.length < tail:
        raise ValueError(f"its row is damaged: its label alone has {tail:,} bytes")
    image = row.encoding in (JPEG, IMAGE)
    if image and (len(shape) != 3 or shape[2] not in (1, 3) or not shape[0] * shape[1]):
        raise ValueError(f"its row says an image of {shape}")


class Shards:
    """A dataset written by ``paceline pack``: a map-style dataset of (array, label), or of arrays
    if it has no labels.

    ``meta`` is the content of paceline.json. Files are not memory-mapped: a file that is truncated
    while it is read raises an error instead of SIGBUS. Other processes that receive the object
    (pickle) open the files again.

    Raises DataError (a ValueError) that names file, sample and offset: for a changed byte, a shard
    that is missing or has another size, or an image that can't be decoded.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.meta: DatasetMeta = shard_format.load_meta(self.folder)
        self._whole = self.meta.array.shape if self.meta.array else ()
        self._check_row = make_row_check(self.meta)
        self._names: SampleNames | None = None
        if self.meta.names:
            checksum = self.meta.files.get(NAMES_FILE)
            self._names = SampleNames(self.folder / NAMES_FILE, self.meta.samples, checksum)
        self._open_lock = ForkSafeLock()
        self._staged = open_staged_here(self.folder)
        self._index = self._open_index()
        # Time of the next check, by shards that are not staged.
        self._next_staged_check: dict[int, float] = {}
        self._files: dict[int, int] = {}

    def __len__(self) -> int:
        return self.meta.samples

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        array, label = self.read(i, ScratchBuffer())
        return array if self.meta.label is None else (array, label)

    def __repr__(self) -> str:
        return f"Shards({str(self.folder)!r}): {counted(len(self), 'sample')}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,)

    def __del__(self) -> None:
        for file in (*self.__dict__.get("_files", {}).values(), self.__dict__.get("_index")):
            if file is not None:
                os.close(file)

    @property
    def images(self) -> bool:
        """Whether samples are images, (height, width, channels)."""
        return self.meta.packed.get("kind") == "images"

    def row(self, i: int) -> IndexRow:
        """Return a sample's row of the index, before its checksum is compared.

        The row has been checked: its sample is inside its shard, and its array is valid in the
        dataset.

        Raises:
            DataError: The row is damaged or hostile. No memory is allocated for its sample.
        """
        try:
            packed = os.pread(self._index, shard_format.ROW_STRUCT.size, i * ROW_BYTES)
            if len(packed) < shard_format.ROW_STRUCT.size:
                raise ValueError("the index is truncated")
            row = shard_format.unpack_row(packed, self._whole)
            self._check_row(row)  # before memory is allocated for the sample
            return row
        except OSError as error:
            reason = f"can't be read: {error.strerror}"
            raise self._bad(INDEX_FILE, i, i * ROW_BYTES, reason) from None
        except ValueError as error:
            raise self._bad(INDEX_FILE, i, i * ROW_BYTES, error) from None

    def rows(self) -> np.ndarray[Any, Any]:
        """Return the index as a structured array: "label", "offset", "length", "shard" ..."""
        kinds: list[Any] = [("label", "<i8"), ("offset", "<u8"), ("length", "<u4")]
        kinds += [("shard", "<u4"), ("shape", "<u4", 4), ("kind", "u1", 4), ("crc", "<u4")]
        path = self.folder / INDEX_FILE
        with open(_open(path), "rb") as file:
            found = np.fromfile(file, np.dtype(kinds), len(self))
        if len(found) < len(self):
            raise DataError(path, -1, 0, f"is truncated: {len(found):,} rows of {len(self):,}")
        return found

    def labels(self) -> np.ndarray[Any, Any]:
        """Return the class of each sample, int64."""
        if self.meta.label != "class":
            raise ValueError(f"{self.folder}: its samples have no classes")
        return np.ascontiguousarray(self.rows()["label"])

    @property
    def classes(self) -> int:
        """Number of classes. Raises DataError if a label exceeds MAX_CLASSES."""
        if self.meta.classes:
            return len(self.meta.classes)
        return count_classes(int(self.labels().max(initial=-1)), self.folder / INDEX_FILE)

    def name(self, i: int) -> str:
        """Return the source of a sample, or "". Raises DataError if names.txt is damaged."""
        try:
            return "" if self._names is None else self._names[i]
        except InvalidFileError as error:
            raise DataError(error.file, -1, 0, error.reason) from None

    def check_files(self) -> list[DataError]:
        """Return the errors of index.bin and names.txt as whole files.

        They detect what the checksums of rows can't: exchanged rows, and changed names.
        """
        found = []
        try:
            if self._names is not None:
                self._names.check()
        except InvalidFileError as error:
            found.append(DataError(error.file, -1, 0, error.reason))
        expected, path = self.meta.files.get(INDEX_FILE), self.folder / INDEX_FILE
        if expected is not None:
            with open(_open(path), "rb") as file:
                crc = 0
                while piece := file.read(PIECE_BYTES):
                    crc = shard_format.checksum(b"", piece, start=crc)
                if (file.tell(), crc) != (expected.bytes, expected.crc):
                    reason = "has changed (its checksum differs): rows may have changed places"
                    found.append(DataError(path, -1, 0, reason))
        return found

    def location(self, i: int) -> tuple[Path, int, int]:
        """Return the file a sample is read from, its offset and its length in bytes."""
        row = self.row(i)
        return self.shard_path(row.shard), row.offset, row.length

    def shard_path(self, shard: int) -> Path:
        """Return the file a shard is read from: the staged copy if it is complete."""
        staged, original = self._staged, self.meta.shards[shard]
        near = staged.path if staged is not None and whole(staged, original) else self.folder
        return near / original.file

    def spec_of(self, i: int) -> tuple[ArraySpec, ArraySpec | None]:
        """Return shape and dtype of a sample and of its label, without reading the sample."""
        row = self.row(i)
        if row.encoding == FILE:
            raise ValueError(
                f"{self.folder}: sample {i} is a file of unknown kind. "
                "HINT: Loader(..., transform=FUNCTION), which makes an array of the file's bytes"
            )
        return ArraySpec(row.dtype, row.shape), self.label

    @property
    def label(self) -> ArraySpec | None:
        """Shape and dtype of a label; None without labels."""
        return shard_format.label_spec(self.meta.label)

    # one sample

    def read(self, i: int, scratch: "ScratchBuffer") -> tuple[Any, Any]:
        """Return (array or bytes, label). The arrays own their memory; ``scratch`` is reused."""
        row, data, label = self.read_raw(i, scratch)
        array = self.decode_sample(i, row, data, None)
        if isinstance(array, np.ndarray) and not (array.flags.owndata and array.flags.writeable):
            array = array.copy()
        return array, label

    def read_part(self, i: int, part: Any, label_part: Any) -> tuple[Any, Any]:
        """Return parts of a sample and of its label, as copies; None for a part: all of it.

        Of a sample that is not compressed, other bytes are hardly read. Its checksum is that of the
        whole sample, which ``check_sample`` compares.
        """
        row = self.row(i)
        if row.encoding != RAW:
            array, whole = self.read(i, ScratchBuffer())
            return array[part or ...].copy(), whole if label_part is None else whole[label_part]
        label: Any = row.label if self.meta.label == "class" else None
        file = self._file(row.shard)
        try:
            array = read_part(file, row.offset, ArraySpec(row.dtype, row.shape), part)
            if isinstance(self.meta.label, ArraySpec):
                place = row.offset + row.length - self.meta.tail
                label = read_part(file, place, self.meta.label, label_part)
        except OSError as error:
            raise self._bad_sample(i, row, f"can't be read: {error.strerror}") from None
        except ValueError as error:
            raise self._bad_sample(i, row, error) from None
        return array, label

    def check_sample(self, i: int, scratch: "ScratchBuffer") -> None:
        """Compare the checksum of a sample, which is read in pieces."""
        row = self.row(i)
        crc = 0
        for first in range(0, row.length, PIECE_BYTES):
            piece = scratch.take(min(PIECE_BYTES, row.length - first))
            self._read_at(i, row, [piece], row.offset + first)
            crc = shard_format.checksum(b"", piece, start=crc)
        if shard_format.checksum(row.covered, start=crc) != row.crc:
            raise self._bad_sample(i, row, CHANGED)

    def read_raw(self, i: int, scratch: "ScratchBuffer") -> tuple[IndexRow, memoryview, Any]:
        """Return a sample's row, its packed bytes (without those of the label), and its label."""
        row = self.row(i)
        data = self._bytes(i, row, scratch)
        label: Any = row.label if self.meta.label == "class" else None
        if self.meta.tail:
            label = self._tail(data)
        return row, data[: len(data) - self.meta.tail], label

    def read_into(self, i: int, arrays: Any, labels: Any, k: int, scratch: "ScratchBuffer") -> None:
        """Copy a sample to ``arrays[k]`` and its label to ``labels[k]``, both in C order.

        Raises RaggedError if the dtype or shape of the sample differs from that of the batch.
        """
        row = self.row(i)
        if row.shape != arrays.shape[1:] or row.dtype != arrays.dtype:
            raise RaggedError(i, ArraySpec(row.dtype, row.shape))
        if row.encoding == RAW and arrays[0].nbytes + self.meta.tail == row.length:
            parts = [_flat(arrays[k : k + 1])]
            self._fill(i, row, parts if not self.meta.tail else [*parts, _flat(labels[k : k + 1])])
        else:
            data = self._bytes(i, row, scratch)
            into = arrays[k : k + 1].reshape(row.shape)
            self.decode_sample(i, row, data[: len(data) - self.meta.tail], into)
            if self.meta.tail:
                labels[k] = self._tail(data)
        if self.meta.label == "class":
            labels[k] = row.label

    def decode_sample(self, i: int, row: IndexRow, data: memoryview, into: Any = None) -> Any:
        """Decode the bytes of a sample."""
        try:
            return decode(row, data, into)
        except (ValueError, ArithmeticError, MemoryError) as error:
            raise self._bad_sample(i, row, error) from None

    def prefetch_block(self, shard: int, block: int, length: int) -> None:
        """Ask the kernel to read a block of a shard into the page cache (POSIX_FADV_WILLNEED)."""
        try:
            file = self._file(shard)
            os.posix_fadvise(file, block * length, length, os.POSIX_FADV_WILLNEED)
        except (OSError, DataError):  # reading the sample raises the error
            pass

    def _bytes(self, i: int, row: IndexRow, scratch: "ScratchBuffer") -> memoryview:
        data = scratch.take(row.length)
        self._fill(i, row, [data])
        return data

    def _fill(self, i: int, row: IndexRow, parts: list[Any]) -> None:
        """Read a sample into ``parts`` and verify its checksum."""
        self._read_at(i, row, parts, row.offset)
        if shard_format.checksum(row.covered, *parts) != row.crc:
            raise self._bad_sample(i, row, CHANGED)

    def _read_at(self, i: int, row: IndexRow, parts: list[Any], at: int) -> None:
        """Read bytes of a sample's shard into ``parts``."""
        file, left = self._file(row.shard), [part for part in parts if len(part)]
        try:
            while left:
                done = os.preadv(file, left, at)
                if not done:
                    raise self._bad_sample(i, row, "the shard is truncated")
                at += done
                while left and done >= len(left[0]):
                    done -= len(left.pop(0))
                if left and done:
                    left[0] = left[0][done:]
        except OSError as error:
            raise self._bad_sample(i, row, f"can't be read: {error.strerror}") from None

    def _tail(self, data: memoryview) -> Any:
        label = self.meta.label
        assert isinstance(label, ArraySpec)
        tail = data[len(data) - label.nbytes :]
        return np.frombuffer(tail, label.dtype).reshape(label.shape).copy()

    def _file(self, shard: int) -> int:
        file = self._files.get(shard)
        if file is None:
            with self._open_lock:
                if shard not in self._files:
                    self._files[shard] = self._open_shard(shard)
                file = self._files[shard]
        elif shard in self._next_staged_check and time.monotonic() > self._next_staged_check[shard]:
            with self._open_lock:
                file = self._switch_to_staged(shard)
        return file

    def _open_shard(self, shard: int) -> int:
        """Open the staged copy of a shard, or else the packed original."""
        near = self._open_staged(shard)
        return _open(self.folder / self.meta.shards[shard].file) if near is None else near

    def _switch_to_staged(self, shard: int) -> int:
        """Switch to the staged copy if it exists by now.

        The descriptor number stays, as threads may still read from it.
        """
        near = self._open_staged(shard)
        if near is not None:
            os.dup2(near, self._files[shard])
            os.close(near)
        return self._files[shard]

    def _open_index(self) -> int:
        """Open the staged index, or else the origin's. The index in a group's folder is not used:
        a member who changes a sample there could also change its checksum."""
        staged = self._staged
        if staged is not None and staged.group is None and staged.status(shard_format.META_FILE):
            try:
                return staged.open_file(shard_format.INDEX_FILE)
            except OSError:
                pass
        return _open(self.folder / shard_format.INDEX_FILE)

    def _open_staged(self, shard: int) -> int | None:
        """Open the staged copy of a shard if it exists and is complete."""
        if self._staged is None:
            return None
        original = self.meta.shards[shard]
        try:
            file = self._staged.open_file(original.file)
            if os.fstat(file).st_size == original.bytes:
                self._next_staged_check.pop(shard, None)
                return file
            os.close(file)
        except OSError:
            pass
        self._next_staged_check[shard] = time.monotonic() + LOOK_S
        return None

    def _bad_sample(self, i: int, row: IndexRow, reason: object) -> DataError:
        folder = self.folder
        if self._staged is not None and row.shard not in self._next_staged_check:
            folder = self._staged.path
        return self._bad(self.meta.shards[row.shard].file, i, row.offset, reason, folder)

    def _bad(
        self, file: str, i: int, offset: int, reason: object, folder: Path | None = None
    ) -> DataError:
        name = ""
        with contextlib.suppress(DataError):  # the sample's error counts, and not that of its name
            name = self.name(i)
        reason = f"{reason} ({name})" if name else f"{reason}"
        return DataError((folder or self.folder) / file, i, offset, reason)


def count_classes(largest: int, file: Path | str) -> int:
    """Return the number of classes for the largest label. Raises DataError above MAX_CLASSES."""
    if largest >= MAX_CLASSES:
        reason = f"has the label {largest:,}, but a dataset has at most {MAX_CLASSES:,} classes"
        raise DataError(file, -1, 0, reason)
    return largest + 1


class ScratchBuffer:
    """A reusable buffer for the bytes of one sample.

    A larger buffer is a new object, as views of the old one may still be in use.
    """

    def __init__(self) -> None:
        self._memory = bytearray()

    def take(self, size: int) -> memoryview:
        if len(self._memory) < size:
            self._memory = bytearray(size + size // 4)
        return memoryview(self._memory)[:size]


class RaggedError(ValueError):
    """A sample has another shape or dtype than its batch. what: the sample's spec."""

    def __init__(self, sample: int, what: ArraySpec) -> None:
        self.sample, self.what = sample, what
        super().__init__(f"sample {sample} is {what.dtype} of {what.shape}")


def _flat(array: Any) -> memoryview:
    """Return the bytes of a C-contiguous array."""
    return memoryview(array.reshape(-1).view(np.uint8))


def _open(path: Path) -> int:
    """Open a regular file for reading; the limit of open files is raised where it is reached."""
    try:
        try:
            return open_regular(path)
        except OSError as error:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            if error.errno != errno.EMFILE or soft == hard:
                raise
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return open_regular(path)
    except FileNotFoundError:
        raise DataError(path, -1, 0, "is missing. HINT: copy it, or pack again") from None
    except OSError as error:
        raise DataError(path, -1, 0, f"can't be opened: {error.strerror}") from None


def verify(
    folder: str | os.PathLike[str],
    workers: int | None = None,
    step: Callable[[int, int], None] | None = None,
) -> list[DataError]:
    """Read every byte and decode every sample of a packed dataset; return the errors.

    They are those of damaged samples, and of index.bin and names.txt as whole files. Verification
    continues after an error. step: called with the samples and bytes verified so far. Raises
    DataError if the folder holds no dataset.
    """
    shards = Shards(Path(folder))
    waiting: deque[Future[tuple[int, list[DataError]]]] = deque()
    found = shards.check_files()
    done = size = at = 0
    workers = workers or len(os.sched_getaffinity(0))
    pool = ThreadPoolExecutor(workers, "paceline-check")
    try:
        while at < len(shards) or waiting:
            while at < len(shards) and len(waiting) < 2 * workers:
                chosen = range(at, min(at + VERIFIED_TOGETHER, len(shards)))
                waiting.append(pool.submit(_verify_chunk, shards, chosen))
                at += VERIFIED_TOGETHER
            read, bad = waiting.popleft().result()
            found += bad
            done, size = min(done + VERIFIED_TOGETHER, len(shards)), size + read
            if step is not None:
                step(done, size)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return found


def _verify_chunk(shards: Shards, chosen: range) -> tuple[int, list[DataError]]:
    scratch, size, bad = ScratchBuffer(), 0, []
    for i in chosen:
        try:
            row, data, _ = shards.read_raw(i, scratch)
            size += row.length
            if row.encoding != FILE:
                shards.decode_sample(i, row, data)
        except DataError as error:
            bad.append(error.with_traceback(None))
    return size, bad
