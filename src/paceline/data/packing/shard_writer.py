"""Write shards. Each complete shard is kept, with its rows and the state needed to continue."""

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ...security.files import read_regular
from ..format import shard_format
from ..format.meta_schema import ArraySpec, DatasetMeta, FileChecksum, Shard
from ..format.shard_format import checksum, create_new_file
from . import pack_state
from .encode import EncodedSample
from .statistics import Statistics

PIECE_STATE_FILE = "whole.json"  # written when all shards of a piece are complete


# File written by a background thread.

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


class ShardWriter:
    """Writer of samples as shards.

    Call ``add_or_skip`` or ``add``, then ``close`` and ``finish``, and in any case ``abort``.

    One thread writes the open shard. A second one completes the previous shard, because it waits
    until the data is on storage.

    Attributes:
        next_place: Place in the order to continue at, after the shards that an earlier writer has
            completed.
        images: Whether the samples are images.
        classes: Whether labels are classes, whose samples are counted.
    """

    def __init__(
        self, folder: Path, work: Path, shard_bytes: int, images: bool, classes: bool = False
    ) -> None:
        self.folder, self.work, self.shard_bytes = folder, work, shard_bytes
        self.images, self.classes = images, classes
        self.shards: list[Shard] = []
        self.left_out: list[str] = []
        self.statistics = Statistics(images)
        self.next_place = 0
        self._fields: list[ArraySpec] = []  # dtype and shape of all samples; two where they differ
        self._names: list[str] = []
        self._rows: list[bytes] = []
        self._file: BackgroundFile | None = None
        self._open_bytes = self._complete_bytes = 0
        self._saved_left_out = 0  # entries of left_out that are in the state of complete shards
        self._write_pool = ThreadPoolExecutor(1, "paceline-write")
        self._complete_pool = ThreadPoolExecutor(1, "paceline-keep")
        self._completing: Future[None] | None = None
        self._completing_number = 0
        while self._load_next_shard():
            pass

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def bytes(self) -> int:
        return self._complete_bytes + self._open_bytes

    @property
    def common_field(self) -> ArraySpec | None:
        """The dtype and shape of all samples; None where they differ."""
        return self._fields[0] if len(self._fields) == 1 else None

    def add_or_skip(self, packed: EncodedSample | str, place: int) -> None:
        """Add a sample; a string is the reason why it is left out."""
        if isinstance(packed, str):
            self.left_out.append(packed)
            return
        self.add(packed, place)
        # Only after the sample is added: if ``add`` ends a shard, that shard's state excludes it.
        if self.classes:
            self.statistics.classes[packed.label] += 1
        if packed.statistics is not None:
            self.statistics.merge(packed.statistics)

    def add(self, packed: EncodedSample, place: int) -> None:
        """Add the sample at ``place`` in the order."""
        if self._file is not None and self._open_bytes + packed.length > self.shard_bytes:
            self._end_shard(place)
        if self._file is None:
            self._file = BackgroundFile(
                self.work / f"shard-{len(self.shards):05}.part", self._write_pool
            )
        self._rows.append(packed.row(len(self.shards), self._open_bytes))
        self._file.write(packed.parts, packed.length)
        self._open_bytes += packed.length
        self._names.append(packed.name)
        self._note_field((packed.dtype, packed.shape))

    def close(self, place: int) -> None:
        """Complete the open shard and wait until all shards are on storage.

        ``place`` is the first place in the order that the shards do not contain.
        """
        if self._file is not None:
            self._end_shard(place)
        if self._completing is not None:
            self._completing.result()

    def _end_shard(self, place: int) -> None:
        """Pass the open shard to the thread that completes it, after the previous shard."""
        assert self._file is not None
        if self._completing is not None:
            self._completing.result()
        number = len(self.shards)
        shard = Shard(f"shard-{number:05}.bin", len(self._rows), self._open_bytes, 0)
        # The checksum is not known yet.
        state = {"shard": vars(shard), "next": place, **self._state(self._saved_left_out)}
        self._file.flush()
        beside = (self._rows, self._names)
        self._completing_number = number
        self._completing = self._complete_pool.submit(
            self._complete_shard, number, shard, self._file, *beside, state
        )
        self.shards.append(shard)
        self._saved_left_out = len(self.left_out)
        self._complete_bytes += shard.bytes
        self._file, self._open_bytes, self._rows, self._names = None, 0, [], []

    def _complete_shard(
        self,
        number: int,
        shard: Shard,
        file: BackgroundFile,
        rows: list[Any],
        names: list[str],
        state: dict[str, Any],
    ) -> None:
        shard.crc = file.sync()
        (self.work / f"shard-{number:05}.part").replace(self.folder / shard.file)
        shard_format.write_atomically(self.work / f"rows-{number:05}", b"".join(rows))
        named = "".join(f"{name}\n" for name in names)
        shard_format.write_atomically(self.work / f"names-{number:05}", os.fsencode(named))
        pack_state.write_state(self.work / f"shard-{number:05}.json", state)

    def finish_piece(self, place: int) -> None:
        """Complete a piece of the dataset, so that another writer can ``adopt_piece`` it."""
        self.close(place)
        state = {"shards": [vars(shard) for shard in self.shards], **self._state(0)}
        pack_state.write_state(self.work / PIECE_STATE_FILE, state)

    def adopt_piece(self, part: Path) -> None:
        """Append the shards of a folder whose writer has called ``finish_piece``.

        If the process is killed meanwhile, calling the method again gives the same result.
        """
        found = pack_state.piece_state(part / PIECE_STATE_FILE)
        for number, old in enumerate(found.shards):
            new_number = len(self.shards)
            shard = Shard(f"shard-{new_number:05}.bin", old.samples, old.bytes, old.crc)
            with suppress(FileNotFoundError):  # moved before the process was killed
                (part / old.file).replace(self.folder / shard.file)
            rows = shard_format.renumber_shard(
                pack_state.rows_of(part, number, old.samples), number, new_number
            )
            with create_new_file(self.work / f"rows-{new_number:05}") as file:
                file.write(rows)
            pack_state.copy_file(part / f"names-{number:05}", self.work / f"names-{new_number:05}")
            self.shards.append(shard)
            self._complete_bytes += shard.bytes
        self.left_out += found.left_out
        self.statistics.merge(Statistics.from_state(self.images, {**found.statistics}))
        for dtype, shape in found.alike:
            self._note_field((dtype, tuple(shape)))

    def abort(self) -> None:
        """Stop the threads and delete an open shard."""
        if self._file is not None:
            self._file.abort()
        for pool in (self._write_pool, self._complete_pool):
            pool.shutdown(wait=True)
        if self._completing is not None and self._completing.exception() is not None:
            with suppress(OSError):  # the disk is full, for example
                (self.work / f"shard-{self._completing_number:05}.part").unlink(missing_ok=True)

    def finish(self, meta: DatasetMeta, named: bool) -> None:
        """Write the index and the names; then the metadata, which marks the dataset as complete."""
        meta.files = {shard_format.INDEX_FILE: self._concatenate("rows", shard_format.INDEX_FILE)}
        if named:
            meta.files[shard_format.NAMES_FILE] = self._concatenate(
                "names", shard_format.NAMES_FILE
            )
        shard_format.save_meta(meta, self.folder)

    def _concatenate(self, kind: str, name: str) -> FileChecksum:
        """Write the index or the names by concatenating those of all shards."""
        part, size, crc = self.work / f"{kind}.part", 0, 0
        try:
            with create_new_file(part) as file:
                for number in range(len(self.shards)):
                    path = self.work / f"{kind}-{number:05}"
                    data = read_regular(path, path.stat().st_size)
                    size, crc = size + len(data), checksum(b"", data, start=crc)
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.folder / name)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return FileChecksum(size, crc)

    def _load_next_shard(self) -> bool:
        """Load the next complete shard of an earlier writer; return whether there is one."""
        number = len(self.shards)
        try:
            found = pack_state.shard_state(self.work, number)
            shard = found.shard
            rows = (self.work / f"rows-{number:05}").stat().st_size
            sizes = ((self.folder / shard.file).stat().st_size, rows)
            if sizes != (shard.bytes, shard.samples * shard_format.ROW_STRUCT.size):
                return False
        except (OSError, ValueError):
            return False
        self.shards.append(shard)
        self._complete_bytes += shard.bytes
        self.next_place = found.next
        self.left_out += found.left_out
        self._saved_left_out = len(self.left_out)
        self.statistics = Statistics.from_state(self.images, {**found.statistics})
        self._fields = [ArraySpec(dtype, tuple(shape)) for dtype, shape in found.alike]
        return True

    def _note_field(self, kind: tuple[str, tuple[int, ...]]) -> None:
        """Note the dtype and shape of a sample."""
        if len(self._fields) < 2 and all(
            kind != (field.dtype, field.shape) for field in self._fields
        ):
            self._fields.append(ArraySpec(*kind))

    def _state(self, saved_left_out: int) -> dict[str, Any]:
        """Return the state after the samples added until now.

        ``saved_left_out`` is the number of entries of ``left_out`` that are saved elsewhere.
        """
        return {
            "left_out": self.left_out[saved_left_out:],
            "statistics": self.statistics.as_state(),
            "alike": [[field.dtype, field.shape] for field in self._fields],
        }
