"""Sequential writing of a shard, without the page cache where that is faster.

Writing through the page cache copies each byte, and takes memory and processor time that the
training needs. Direct I/O does not, but needs whole blocks in the file and in memory.
"""

import errno
import fcntl
import os
from pathlib import Path

import numpy as np
from crc32c import crc32c

from .pages import map_memory

BLOCK_BYTES = 4096  # a multiple of the sectors of all disks
WRITE_BYTES = 16 << 20  # of one call
PENDING_BYTES = 4 << 20
DIRECT_FILE_SYSTEMS = ("ext4", "xfs")  # of local disks; network file systems write behind


class ShardFile:
    """A new file that is written from its beginning to its end, with its CRC-32C.

    Attributes:
        bytes: Number of bytes so far.
        crc: Their CRC-32C.
        error: The error of the last write; torch raises a RuntimeError instead of it.
    """

    def __init__(self, fd: int) -> None:
        """Write to the empty file ``fd``, which remains the caller's."""
        self._fd = fd
        self.bytes = self.crc = 0
        self.error: OSError | None = None
        self._is_direct = file_system(fd) in DIRECT_FILE_SYSTEMS and _set_direct(fd, True)
        self._pending = memoryview(map_memory(PENDING_BYTES))  # begins at a block of the file
        self._count = 0

    def write(self, data: bytes | memoryview) -> int:
        """Add bytes. Raises OSError."""
        left = memoryview(data)
        self.bytes += len(left)
        try:
            while left:
                left = left[self._add(left) :]
        except OSError as error:
            self.error = error
            raise
        return len(data)

    def _add(self, data: memoryview) -> int:
        """Write or keep the first bytes of ``data``; return their number."""
        whole = min(len(data), WRITE_BYTES) // BLOCK_BYTES * BLOCK_BYTES
        if whole and not self._count % BLOCK_BYTES and not _address(data) % BLOCK_BYTES:
            self._write(self._pending[: self._count])
            self._count = 0
            self.crc = crc32c(data[:whole], self.crc)
            self._write(data[:whole])
            return whole
        size = min(len(data), PENDING_BYTES - self._count)
        kept = self._pending[self._count : self._count + size]
        kept[:] = data[:size]
        self.crc = crc32c(kept, self.crc)
        self._count += size
        if self._count == PENDING_BYTES:
            self._write(self._pending)
            self._count = 0
        return size

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except OSError as error:
                # such as the rest of a block, or a file system without direct I/O
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._is_direct = not _set_direct(self._fd, False)
                if self._is_direct:
                    raise

    def flush(self) -> None:
        """Do nothing: ``finish`` writes the rest. torch.save calls it."""

    def finish(self) -> None:
        """Write the rest, and flush the file to disk. Raises OSError."""
        whole = self._count // BLOCK_BYTES * BLOCK_BYTES
        self._write(self._pending[:whole])
        if self._is_direct and _set_direct(self._fd, False):
            self._is_direct = False
        self._write(self._pending[whole : self._count])
        self._count = 0
        os.fsync(self._fd)


def file_system(fd: int) -> str:
    """Return the type of the file system of a file as the kernel lists it; "" if unknown."""
    device = os.fstat(fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    found = [line.partition(" - ")[2].split() for line in lines if line.split()[2:3] == [number]]
    return found[0][0] if found and found[0] else ""


def _set_direct(fd: int, enabled: bool) -> bool:
    """Set whether writes bypass the page cache; return False if that is not possible."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if enabled else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, wanted)
    except OSError:
        return False
    return True


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])
