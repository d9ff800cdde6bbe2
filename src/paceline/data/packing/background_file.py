"""A file that is written by a thread beside."""

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ..format.shard_format import checksum, create_new_file

PIECE = 1 << 20  # bytes that are handed to the thread at a time, about
PIECES = 4  # that wait for it, at most
FEW = 16  # parts; more of them become one before they are written


class Beside:
    """``write`` parts, then ``end`` and ``kept``, or ``abort``. What goes wrong in the thread is
    raised by a later call."""

    def __init__(self, path: Path, pool: ThreadPoolExecutor) -> None:
        self._path = path
        self._file: BinaryIO = create_new_file(path, buffering=0)
        self._pool, self._crc = pool, 0
        self._held: list[Any] = []
        self._size = 0
        self._waiting: deque[Future[None]] = deque()

    def write(self, parts: list[Any], length: int) -> None:
        """Parts that nobody changes any more but for bytearrays, which are copied."""
        self._held += [bytes(part) if isinstance(part, bytearray) else part for part in parts]
        self._size += length
        if self._size >= PIECE:
            self._hand()

    def end(self) -> None:
        """Nothing more comes."""
        self._hand()

    def kept(self) -> int:
        """The checksum of all of it, once it is on its storage. Another thread may wait for it."""
        with self._file as file:
            while self._waiting:
                self._waiting.popleft().result()
            os.fsync(file.fileno())
        return self._crc

    def abort(self) -> None:
        """Without a word of what went wrong, which was raised already. Nothing of it is left."""
        for one in self._waiting:
            one.cancel()
        self._pool.submit(self._file.close).exception()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _hand(self) -> None:
        held, self._held, self._size = self._held, [], 0
        self._waiting.append(self._pool.submit(self._written, held))
        while len(self._waiting) > PIECES:
            self._waiting.popleft().result()

    def _written(self, parts: list[Any]) -> None:
        for part in [b"".join(parts)] if len(parts) > FEW else parts:
            self._crc = checksum(b"", part, start=self._crc)
            done = 0
            while done < len(part):
                done += self._file.write(part[done:] if done else part)
