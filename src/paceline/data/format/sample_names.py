"""names.txt: the source of each sample of a packed dataset, one line per sample."""

import os
import threading
from array import array
from pathlib import Path

import numpy as np
from crc32c import crc32c

from ...security.files import InvalidFileError, check_regular, open_regular
from ...security.text import printable
from ..boundary import Boundary
from .meta_schema import FileChecksum

MAX_NAME_BYTES = 1 << 16
PIECE_BYTES = 1 << 20
NEWLINE = 10


class SampleNames:
    """The names of the samples of a packed dataset. Thread-safe.

    The first call reads the whole file, and compares its checksum and number of lines. After that,
    each name takes one read.

    Args:
        path: Path of names.txt.
        samples: Number of samples of the dataset, and of lines that the file must have.
        expected: Size and checksum of the file; None for datasets that older versions packed.
    """

    def __init__(self, path: Path, samples: int, expected: FileChecksum | None) -> None:
        self.path, self.samples, self.expected = path, samples, expected
        self._lock = threading.Lock()
        self._fd = -1
        self._ends: array[int] | None = None

    def __getitem__(self, i: int) -> str:
        """Return the name of a sample.

        Raises:
            InvalidFileError: The file is missing, not a regular file, or corrupted.
        """
        ends = self.check()
        start = ends[i - 1] if i else 0
        try:
            line = os.pread(self._fd, ends[i] - start, start)
        except OSError as error:
            raise self._invalid(f"can't be read: {error.strerror}") from None
        return os.fsdecode(line.removesuffix(b"\n"))

    def __del__(self) -> None:
        if self.__dict__.get("_fd", -1) >= 0:
            os.close(self._fd)

    def check(self) -> "array[int]":
        """Return the end offset of each line in bytes.

        The first call compares size, checksum and number of lines.
        """
        with self._lock:
            if self._ends is None:
                try:
                    if self.expected is None and not Boundary(self.path.parent).contains(self.path):
                        raise self._invalid(
                            f"is a link to {os.path.realpath(self.path)}, which is not in the "
                            "dataset's folder, and has no checksum. HINT: copy the file there"
                        )
                    if self._fd < 0:
                        self._fd = open_regular(self.path)
                    self._ends = self._lines()
                except FileNotFoundError:
                    raise self._invalid("is missing. HINT: copy it, or pack again") from None
                except OSError as error:
                    raise self._invalid(f"can't be read: {error.strerror}") from None
            return self._ends

    def _lines(self) -> "array[int]":
        size = check_regular(self._fd, self.path).st_size
        if self.expected is not None and size != self.expected.bytes:
            raise self._invalid(f"has {size:,} bytes of {self.expected.bytes:,}")
        ends, at, crc = array("q"), 0, 0
        while piece := os.pread(self._fd, PIECE_BYTES, at):
            crc = crc32c(piece, crc)
            found = np.flatnonzero(np.frombuffer(piece, np.uint8) == NEWLINE) + (at + 1)
            ends.frombytes(found.astype(np.int64).tobytes())
            at += len(piece)
            if len(ends) > self.samples or at - (ends[-1] if ends else 0) > MAX_NAME_BYTES:
                break
        if self.expected is not None and at == size and crc != self.expected.crc:
            raise self._invalid("a byte has changed (its checksum differs)")
        if len(ends) != self.samples or (ends and ends[-1] != at):
            raise self._invalid(f"does not have one line for each of {self.samples:,} samples")
        widths = np.diff(np.frombuffer(ends, np.int64), prepend=0)
        if len(widths) and widths.max() > MAX_NAME_BYTES:
            raise self._invalid(f"has a name of more than {MAX_NAME_BYTES:,} bytes")
        return ends

    def _invalid(self, reason: str) -> InvalidFileError:
        return InvalidFileError(self.path, reason)


def to_name_line(name: str) -> str:
    """Return a name that can be written as one line: without newlines, encodable, not too long."""
    if "\n" in name:
        name = printable(name)
    elif name.isascii() and len(name) < MAX_NAME_BYTES:  # the common case
        return name
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        name = printable(name)
        encoded = os.fsencode(name)
    if len(encoded) >= MAX_NAME_BYTES:
        name = os.fsdecode(encoded[: MAX_NAME_BYTES - 1])
    return name
