"""File written by a background thread."""

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ..format.shard_format import checksum, create_new_file

CHUNK_BYTES = 1 << 20  # approximate bytes passed to the thread at once
MAX_WAITING_CHUNKS = 4
MAX_PARTS = 16  # per chunk; more of them are joined before they are written


class BackgroundFile:
    """A file that a background thread writes.

    Call ``write``, then ``flush`` and ``sync``, or ``abort``. An error of the thread is raised by
    the next call.
    """

    def __init__(self, path: Path, pool: ThreadPoolExecutor) -> None:
        self._path = path
        self._file: BinaryIO = create_new_file(path, buffering=0)
        self._pool, self._crc = pool, 0
        self._parts: list[Any] = []
        self._size = 0
        self._waiting: deque[Future[None]] = deque()

    def write(self, parts: list[Any], length: int) -> None:
        """Write parts. The caller must not change them afterwards; only bytearrays are copied."""
        self._parts += [bytes(part) if isinstance(part, bytearray) else part for part in parts]
        self._size += length
        if self._size >= CHUNK_BYTES:
            self._submit()

    def flush(self) -> None:
        """Pass the remaining data to the thread."""
        self._submit()

    def sync(self) -> int:
        """Wait until all is on storage and return the checksum; any thread may call it."""
        with self._file as file:
            while self._waiting:
                self._waiting.popleft().result()
            os.fsync(file.fileno())
        return self._crc

    def abort(self) -> None:
        """Delete the file. Errors are ignored, as an earlier call has raised them."""
        for future in self._waiting:
            future.cancel()
        self._pool.submit(self._file.close).exception()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _submit(self) -> None:
        parts, self._parts, self._size = self._parts, [], 0
        self._waiting.append(self._pool.submit(self._write_parts, parts))
        while len(self._waiting) > MAX_WAITING_CHUNKS:
            self._waiting.popleft().result()

    def _write_parts(self, parts: list[Any]) -> None:
        for part in [b"".join(parts)] if len(parts) > MAX_PARTS else parts:
            self._crc = checksum(b"", part, start=self._crc)
            done = 0
            while done < len(part):
                done += self._file.write(part[done:] if done else part)
