"""The shard format: samples stored contiguously in a few large files, with an index.

    paceline.json      metadata: counts, shards, classes, statistics, the checksums of index.bin
                       and names.txt ("files", not in older datasets), and its own checksum
    index.bin          one row of 48 bytes per sample, in the order of the dataset
    shard-00000.bin    the bytes of the samples, without padding
    names.txt          the source of each sample, one line per sample (datasets made from files)

Fields of a row, little endian: label int64, offset uint64, length uint32, shard uint32,
shape 4 x uint32, dtype uint8, ndim uint8, encoding uint8, a zero byte, and as uint32 the CRC-32C
(Castagnoli) of the sample followed by these 44 bytes. So a flipped bit is detected in a label as
well as in an image. An array label is stored after its sample, and counts as part of it.
"""

import json
import os
import re
import stat
import struct
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from crc32c import crc32c

from ...security.files import InvalidFileError, kind_of_file, read_regular
from ...security.schema import load_json
from ...security.text import printable
from .meta_schema import (
    DTYPES,
    MAX_META_BYTES,
    MAX_PARSED_META_BYTES,
    ArraySpec,
    DatasetMeta,
    validate_meta,
)

FORMAT, VERSION = "paceline-shards", 1
META_FILE, INDEX_FILE, NAMES_FILE = "paceline.json", "index.bin", "names.txt"
# Stands for the checksum of paceline.json while that checksum is computed.
CHECKSUM_PLACEHOLDER = "........"
ROW_STRUCT = struct.Struct("<qQII4IBBBxI")
CHECKSUMMED_ROW_BYTES = ROW_STRUCT.size - 4  # the first bytes of a row, which its checksum covers
_SHARD_FIELD_OFFSET = 20  # offset of the shard number in a row, in bytes
_ROW_PARTS_DTYPE = np.dtype([("a", "V20"), ("shard", "<u4"), ("b", "V20"), ("crc", "<u4")])
MAX_ROW_DIMS = 4  # shapes with more dimensions are stored once, in paceline.json
NDIM_IN_META = 255  # value of ndim if the shape is stored in paceline.json

RAW, ZSTD, JPEG, IMAGE, FILE = range(5)  # encodings
ENCODING_NAMES = ("array", "array, zstd", "JPEG", "image", "file")
_CHECKSUM = re.compile(r"[0-9a-f]{8}")


class DataError(InvalidFileError):
    """A sample or file of a dataset that can't be read or is corrupted.

    Attributes:
        file: Path of the file.
        sample: Number of the sample in the dataset, or -1.
        offset: Offset of the sample in the file, in bytes.
        reason: Description of the error.
    """

    def __init__(self, file: Path | str, sample: int, offset: int, reason: str) -> None:
        where = f"{file}: sample {sample} at byte {offset:,}" if sample >= 0 else f"{file}"
        super().__init__(printable(where), printable(reason))
        self.file, self.sample, self.offset, self.reason = Path(file), sample, offset, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.file, self.sample, self.offset, self.reason)


class IndexRow(NamedTuple):
    """One row of the index.

    Attributes:
        label: Class of the sample.
        offset: Offset of the sample in its shard, in bytes.
        length: Size of the sample in bytes, including an array label.
        shard: Number of the shard.
        shape: Shape of the decoded sample.
        dtype: Dtype of the decoded sample.
        encoding: One of RAW, ZSTD, JPEG, IMAGE and FILE.
        crc: CRC-32C of the sample and of ``covered``.
        covered: The bytes of the row that the checksum covers.
    """

    label: int
    offset: int
    length: int
    shard: int
    shape: tuple[int, ...]
    dtype: str
    encoding: int
    crc: int
    covered: bytes


def label_spec(label: ArraySpec | str | None) -> ArraySpec | None:
    """Return dtype and shape of labels: int64 for classes; None without labels."""
    if label is None or isinstance(label, ArraySpec):
        return label
    return ArraySpec("int64", ())


def save_meta(meta: DatasetMeta, folder: Path) -> None:
    """Write paceline.json atomically."""
    head = {"format": FORMAT, "version": VERSION, "checksum": CHECKSUM_PLACEHOLDER}
    text = json.dumps({**head, **asdict(meta)}, indent=1).encode() + b"\n"
    if len(text) > MAX_META_BYTES:
        raise ValueError(
            f"{folder}: {META_FILE} would have {len(text):,} bytes; the maximum is "
            f"{MAX_META_BYTES:,}. "
            "HINT: use larger shards (--shard-size), or fewer or shorter class names"
        )
    sealed = text.replace(CHECKSUM_PLACEHOLDER.encode(), f"{crc32c(text):08x}".encode(), 1)
    write_atomically(folder / META_FILE, sealed)


def create_new_file(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a new file for writing.

    An existing file or link of that name is removed; the link's target is never written to.
    """
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    return open(fd, "wb", buffering)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically; if the disk is full, no part of it is left."""
    part = path.with_name(f".{path.name}.part")
    try:
        with create_new_file(part) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def load_meta(folder: Path) -> DatasetMeta:
    """Return the metadata of a packed dataset, from its paceline.json.

    Raises:
        DataError: The file has another format or version, is corrupted or contains an invalid
            value, or a file of the dataset is missing, not regular or of the wrong size.
    """
    path = folder / META_FILE
    tree = _read_verified(folder)
    try:
        meta = validate_meta(tree, path)
    except InvalidFileError as error:
        raise DataError(path, -1, 0, error.reason) from None
    for shard in meta.shards:
        _check_file_size(folder / shard.file, shard.bytes)
    _check_file_size(folder / INDEX_FILE, meta.samples * ROW_STRUCT.size)
    return meta


def read_meta_checksum(folder: Path) -> str:
    """Return the checksum in a dataset's paceline.json, as eight hexadecimal digits.

    Raises:
        DataError: The file can't be read, or is not a paceline.json of this version.
    """
    tree, _ = _read(folder)
    return str(tree["checksum"])


def _read_verified(folder: Path) -> dict[str, Any]:
    """Return the parsed paceline.json after its checksum was verified."""
    tree, text = _read(folder)
    stored = tree["checksum"]
    if f"{crc32c(text.replace(stored.encode(), CHECKSUM_PLACEHOLDER.encode(), 1)):08x}" != stored:
        raise DataError(folder / META_FILE, -1, 0, "a byte has changed (its checksum differs)")
    return tree


def _read(folder: Path) -> tuple[dict[str, Any], bytes]:
    """Return paceline.json, parsed and as bytes.

    Its format and version, and the syntax of its checksum, have been checked.
    """
    path = folder / META_FILE
    try:
        text = read_regular(path, MAX_META_BYTES)
        tree = load_json(text, path, MAX_PARSED_META_BYTES)
    except FileNotFoundError:
        raise _missing_dataset_error(folder) from None
    except InvalidFileError as error:
        raise DataError(path, -1, 0, error.reason) from None
    except OSError as error:
        raise DataError(path, -1, 0, f"can't be read: {error.strerror or error}") from None
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise DataError(
            path, -1, 0, "is not the metadata of a packed dataset. HINT: paceline pack SOURCE DEST"
        )
    if tree.get("version") != VERSION:
        version = f"{tree.get('version')!r}"[:20]
        reason = f"has format version {version}, but this Paceline reads version {VERSION}. "
        hint = "HINT: use the Paceline that packed it, or pack again"
        raise DataError(path, -1, 0, reason + hint)
    stored = tree.get("checksum")
    if not isinstance(stored, str) or not _CHECKSUM.fullmatch(stored):
        raise DataError(path, -1, 0, "a byte has changed (its checksum is not valid)")
    return tree, text


def pack_row(
    label: int,
    offset: int,
    length: int,
    shard: int,
    shape: tuple[int, ...],
    dtype: str,
    encoding: int,
) -> bytes:
    """Return the first 44 bytes of the row with these values."""
    ndim = len(shape)
    if ndim > MAX_ROW_DIMS:
        ndim, shape = NDIM_IN_META, ()
    sides = (*shape, *(0,) * (MAX_ROW_DIMS - len(shape)))
    kind = DTYPES.index(dtype)
    packed = ROW_STRUCT.pack(label, offset, length, shard, *sides, kind, ndim, encoding, 0)
    return packed[:CHECKSUMMED_ROW_BYTES]


def unpack_row(packed: bytes, whole: tuple[int, ...]) -> IndexRow:
    """Return a row of the index. Its checksum is not verified.

    Args:
        packed: The 48 bytes of the row.
        whole: Shape of the samples if they have more than MAX_ROW_DIMS dimensions.

    Raises:
        ValueError: The bytes are not a valid row.
    """
    label, offset, length, shard, a, b, c, d, kind, ndim, encoding, crc = ROW_STRUCT.unpack(packed)
    if (
        kind >= len(DTYPES)
        or encoding >= len(ENCODING_NAMES)
        or (ndim > MAX_ROW_DIMS and ndim != NDIM_IN_META)
    ):
        raise ValueError("its row in the index is damaged")
    shape = whole if ndim == NDIM_IN_META else (a, b, c, d)[:ndim]
    covered = packed[:CHECKSUMMED_ROW_BYTES]
    return IndexRow(label, offset, length, shard, shape, DTYPES[kind], encoding, crc, covered)


def renumber_shard(rows: bytes, shard: int, other: int) -> bytes:
    """Return rows of one shard with another shard number and updated checksums.

    The samples are not needed: a CRC is linear, so changing the shard number changes the CRC of
    all rows by the same value, whatever the samples are.
    """
    table = np.frombuffer(rows, _ROW_PARTS_DTYPE).copy()
    changed = bytes(_SHARD_FIELD_OFFSET) + (shard ^ other).to_bytes(4, "little")
    table["shard"] = other
    table["crc"] ^= crc32c(changed.ljust(CHECKSUMMED_ROW_BYTES, b"\0")) ^ crc32c(
        bytes(CHECKSUMMED_ROW_BYTES)
    )
    return table.tobytes()


def checksum(covered: bytes, *parts: Any, start: int = 0) -> int:
    """Return the CRC-32C of a sample and its row. The GIL is released during the computation.

    Args:
        covered: The first 44 bytes of the row.
        parts: Bytes of the sample.
        start: CRC-32C of preceding bytes.
    """
    value = start
    for part in parts:
        value = crc32c(part, value)
    return int(crc32c(covered, value)) if covered else value


def _check_file_size(path: Path, wanted: int) -> None:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise DataError(path, -1, 0, "is missing. HINT: copy it, or pack again") from None
    except OSError as error:
        raise DataError(path, -1, 0, f"can't be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        kind = kind_of_file(status.st_mode)
        raise DataError(path, -1, 0, f"is {kind} and no regular file")
    size = status.st_size
    if size != wanted:
        less = "is truncated" if size < wanted else "is too long"
        raise DataError(
            path, -1, 0, f"{less}: {size:,} bytes of {wanted:,}. HINT: copy it, or pack again"
        )


def _missing_dataset_error(folder: Path) -> DataError:
    if (folder / ".packing").exists():
        why = "is not packed completely. HINT: repeat the same paceline pack, which continues"
    elif folder.is_dir():
        why = f"has no {META_FILE}. HINT: paceline pack SOURCE {folder}"
    else:
        why = "the folder does not exist"
    return DataError(folder, -1, 0, why)
