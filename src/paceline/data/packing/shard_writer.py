"""Shards as they are written: each whole one is kept, with its rows and what is needed to go on."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...security.files import read_regular
from ..format import shard_format
from ..format.meta_schema import FileChecksum
from ..format.shard_format import ArraySpec, DatasetMeta, Shard, checksum, create_new_file
from . import pack_state
from .background_file import Beside
from .encode import Packed
from .statistics import Statistics

WHOLE = "whole.json"  # of a writer that has written a part of a set, and all of that


class Writer:
    """``take`` or ``add`` samples, ``close``, ``finish``, and in any case ``abort``. next: the
    place in the order to go on at, behind what an earlier writer has left whole. A thread writes,
    and another one keeps the shard before: it waits for the storage."""

    def __init__(
        self, folder: Path, work: Path, shard_bytes: int, images: bool, classes: bool = False
    ) -> None:
        """classes: whether labels are, and are counted."""
        self.folder, self.work, self.limit = folder, work, shard_bytes
        self.images, self.classes = images, classes
        self.shards: list[Shard] = []
        self.left_out: list[str] = []
        self.statistics = Statistics(images)
        self.next = 0
        self._alike: list[ArraySpec] = []  # of all samples so far; two where they differ
        self._names: list[str] = []
        self._rows: list[bytes] = []
        self._file: Beside | None = None
        self._at = self._whole = self._out = 0  # bytes: of the open shard, of those before
        self._writes, self._keeps = (
            ThreadPoolExecutor(1, f"paceline-{name}") for name in ("write", "keep")
        )
        self._keeping: Future[None] | None = None
        self._kept_number = 0  # of the shard that is being kept
        while self._kept():
            pass

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def bytes(self) -> int:
        return self._whole + self._at

    @property
    def alike(self) -> ArraySpec | None:
        """What all samples are; None where they differ."""
        return self._alike[0] if len(self._alike) == 1 else None

    def take(self, packed: Packed | str, place: int) -> None:
        """The next sample, or why there is none."""
        if isinstance(packed, str):
            self.left_out.append(packed)
            return
        self.add(packed, place)
        # after it: a shard that ends before it has no part of it
        if self.classes:
            self.statistics.classes[packed.label] += 1
        if packed.statistics is not None:
            self.statistics.merge(packed.statistics)

    def add(self, packed: Packed, place: int) -> None:
        """The next sample; place: in the order."""
        if self._file is not None and self._at + packed.length > self.limit:
            self._end(place)
        if self._file is None:
            self._file = Beside(self.work / f"shard-{len(self.shards):05}.part", self._writes)
        self._rows.append(packed.row(len(self.shards), self._at))
        self._file.write(packed.parts, packed.length)
        self._at += packed.length
        self._names.append(packed.name)
        self._as_well((packed.dtype, packed.shape))

    def close(self, place: int) -> None:
        """The open shard is whole, and all are kept; place: the first one in the order that is
        not in it."""
        if self._file is not None:
            self._end(place)
        if self._keeping is not None:
            self._keeping.result()

    def _end(self, place: int) -> None:
        """The open shard is kept by the thread for it, once the one before is."""
        assert self._file is not None
        if self._keeping is not None:
            self._keeping.result()
        number = len(self.shards)
        shard = Shard(f"shard-{number:05}.bin", len(self._rows), self._at, 0)
        # the checksum is still to come
        told = {"shard": vars(shard), "next": place, **self._state(self._out)}
        self._file.end()
        beside = (self._rows, self._names)
        self._kept_number = number
        self._keeping = self._keeps.submit(self._keep, number, shard, self._file, *beside, told)
        self.shards.append(shard)
        self._out, self._whole = len(self.left_out), self._whole + shard.bytes
        self._file, self._at, self._rows, self._names = None, 0, [], []

    def _keep(
        self,
        number: int,
        shard: Shard,
        file: Beside,
        rows: list[Any],
        names: list[str],
        told: dict[str, Any],
    ) -> None:
        shard.crc = file.kept()
        (self.work / f"shard-{number:05}.part").replace(self.folder / shard.file)
        shard_format.write_atomically(self.work / f"rows-{number:05}", b"".join(rows))
        named = "".join(f"{name}\n" for name in names)
        shard_format.write_atomically(self.work / f"names-{number:05}", os.fsencode(named))
        shard_format.write_atomically(
            self.work / f"shard-{number:05}.json", pack_state.as_json(told)
        )

    def whole(self, place: int) -> None:
        """Its part of the set is complete: as ``adopt`` of the set's own writer takes it."""
        self.close(place)
        told = {"shards": [vars(shard) for shard in self.shards], **self._state(0)}
        shard_format.write_atomically(self.work / WHOLE, pack_state.as_json(told))

    def adopt(self, part: Path) -> None:
        """Behind what there is, the shards of a folder whose writer was ``whole``. Killed in it,
        and done again, it is the same."""
        found = pack_state.whole_state(part / WHOLE)
        for there, was in enumerate(found.shards):
            here = len(self.shards)
            shard = Shard(f"shard-{here:05}.bin", was.samples, was.bytes, was.crc)
            with suppress(FileNotFoundError):  # done before the kill
                (part / was.file).replace(self.folder / shard.file)
            rows = shard_format.renumber_shard(
                pack_state.rows_of(part, there, was.samples), there, here
            )
            with create_new_file(self.work / f"rows-{here:05}") as file:
                file.write(rows)
            pack_state.copy_file(part / f"names-{there:05}", self.work / f"names-{here:05}")
            self.shards.append(shard)
            self._whole += shard.bytes
        self.left_out += found.left_out
        self.statistics.merge(Statistics.of_state(self.images, {**found.statistics}))
        for dtype, shape in found.alike:
            self._as_well((dtype, tuple(shape)))

    def abort(self) -> None:
        """Nothing more comes; an open shard is not kept."""
        if self._file is not None:
            self._file.abort()
        for pool in (self._writes, self._keeps):
            pool.shutdown(wait=True)
        if self._keeping is not None and self._keeping.exception() is not None:
            with suppress(OSError):  # of a full disk, say
                (self.work / f"shard-{self._kept_number:05}.part").unlink(missing_ok=True)

    def finish(self, meta: DatasetMeta, named: bool) -> None:
        """The index, the names, and last of all what says that the set is whole."""
        meta.files = {shard_format.INDEX_FILE: self._joined("rows", shard_format.INDEX_FILE)}
        if named:
            meta.files[shard_format.NAMES_FILE] = self._joined("names", shard_format.NAMES_FILE)
        meta.save(self.folder)

    def _joined(self, kind: str, name: str) -> FileChecksum:
        """Write the index or the names, of those of all shards."""
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

    def _kept(self) -> bool:
        """Whether there is one more whole shard of an earlier writer."""
        number = len(self.shards)
        try:
            found = pack_state.shard_state(self.work, number)
            shard = pack_state.shard_of(found.shard)
            rows = (self.work / f"rows-{number:05}").stat().st_size
            sizes = ((self.folder / shard.file).stat().st_size, rows)
            if sizes != (shard.bytes, shard.samples * shard_format.ROW_STRUCT.size):
                return False
        except (OSError, ValueError):
            return False
        self.shards.append(shard)
        self._whole += shard.bytes
        self.next = found.next
        self.left_out += found.left_out
        self._out = len(self.left_out)
        self.statistics = Statistics.of_state(self.images, {**found.statistics})
        self._alike = [ArraySpec(dtype, tuple(shape)) for dtype, shape in found.alike]
        return True

    def _as_well(self, kind: tuple[str, tuple[int, ...]]) -> None:
        """A sample is this, too: its dtype and shape."""
        if len(self._alike) < 2 and all(kind != (one.dtype, one.shape) for one in self._alike):
            self._alike.append(ArraySpec(*kind))

    def _state(self, out: int) -> dict[str, Any]:
        """What is known of the samples so far. out: how many of those that were left out are
        written down elsewhere."""
        return {
            "left_out": self.left_out[out:],
            "statistics": self.statistics.as_state(),
            "alike": [[one.dtype, one.shape] for one in self._alike],
        }
