"""Read sources: only regular files, and never more bytes than a sample may have."""

import errno
import os
import stat
from collections.abc import Callable

from ...security.files import check_regular, open_regular
from ...security.text import printable
from ..boundary import Boundary
from ..format.meta_schema import MAX_SAMPLE_BYTES
from .content import HEAD_BYTES

OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
CHUNK_BYTES = 1 << 20
# Values that are not stored (fill values) or compressed become full samples in a packed dataset.
MAX_PACKED_BYTES = 16 << 30  # of any source
MAX_EXPANSION = 2048  # of larger ones: packed bytes for each stored byte; deflate has at most 1,032
INDEX_ROW_BYTES = 48  # of each packed sample


class OpenFile:
    """An open regular file. It is closed when the last reference is gone, also if the constructor
    of its owner raises.

    Attributes:
        fd: The file descriptor.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.fd = -1
        self.fd = open_regular(path)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close


def read_sample_file(path: str, boundary: Boundary) -> bytes:
    """Return the bytes of a file that is one sample; links inside of the boundary are followed.

    Raises:
        UnsafeFileError: It is a FIFO, socket, device or folder.
        ValueError: It has more than MAX_SAMPLE_BYTES, or is a link that leads out of the boundary.
    """
    try:
        fd = os.open(path, OPEN_FLAGS | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            boundary.check(path, f"the link {path}")
        fd = open_regular(path)  # raises the error with a message for users
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            check_regular(fd, path)  # raises the error with a message for users
        size = status.st_size
        check_size(size)
        data = os.read(fd, size + 1)
        if len(data) == size:
            return data
        parts = [data]  # the file has grown, or read returned less than asked
        done = len(data)
        while parts[-1]:
            parts.append(os.read(fd, CHUNK_BYTES))
            done += len(parts[-1])
            check_size(done)
        return b"".join(parts)
    finally:
        os.close(fd)


def read_head(path: str | os.PathLike[str]) -> bytes:
    """Return the first bytes of a file, or b"" if it can't be read, which its reader reports."""
    try:
        file = OpenFile(path)
        return os.pread(file.fd, HEAD_BYTES, 0)
    except (OSError, ValueError):
        return b""


def read_at(fd: int, length: int, offset: int) -> bytes:
    """Return ``length`` bytes of an open regular file, or as many as there are. The length is
    compared with the file size before memory is allocated, as it may come from a damaged file.

    Raises:
        ValueError: ``length`` is negative or more than MAX_SAMPLE_BYTES, or ``offset`` negative.
    """
    if length < 0 or offset < 0:
        raise ValueError(f"{length} bytes at byte {offset} are not a range of a file")
    check_size(length)
    left = os.fstat(fd).st_size - offset
    length = max(min(length, left), 0)
    data = os.pread(fd, length, offset) if length else b""
    if len(data) == length:
        return data
    parts, done = [data], len(data)
    while done < length and parts[-1]:
        parts.append(os.pread(fd, length - done, offset + done))
        done += len(parts[-1])
    return b"".join(parts)


def check_size(size: int) -> None:
    if size > MAX_SAMPLE_BYTES:
        raise ValueError(f"has {size:,} bytes, more than 4 GiB. HINT: cut it into patches")


def check_expansion(
    description: str, samples: int, sample_bytes: int, stored_bytes: Callable[[], int]
) -> None:
    """Check that a small file does not pretend to be a dataset that packs without end.

    Args:
        stored_bytes: Returns the size of the samples on disk; only called for large sources.

    Raises:
        ValueError: The samples are too large for what is stored of them.
    """
    size = samples * (sample_bytes + INDEX_ROW_BYTES)
    if size <= MAX_PACKED_BYTES or size <= MAX_EXPANSION * (stored := stored_bytes()):
        return
    raise ValueError(
        f"{printable(description)}: {samples:,} samples of {sample_bytes:,} bytes would be packed "
        f"as {size:,} bytes, but only {stored:,} bytes are stored: the values were never written, "
        f"or are compressed more than {MAX_EXPANSION:,} times. HINT: if this is meant, use "
        "MODULE:FUNCTION as SOURCE, which yields the samples"
    )
