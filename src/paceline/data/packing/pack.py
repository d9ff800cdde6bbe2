"""``paceline pack``: a folder of files, arrays or a stream, into shards in random order.

One thread writes, others read and encode ahead of it: what is written depends on the source and
the seed, not on how many they are, nor on whether a kill came between. Each whole shard is kept
with its rows in DEST/.packing; the same call once more goes on behind the last one.

Ranks do it side by side in pieces of the order (pieces.py; study/packing starts them), which are
joined at the end: the same samples in the same order with the same seed, each with its row and
checksum, and the same statistics but for the last digits of floating point. Where shards begin
depends on the pieces, nothing else does. A call in one process goes on with pieces, too.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..format import shard_format
from ..format.shard_format import FILE, IMAGE, JPEG, RAW, ZSTD, DatasetMeta
from ..sources.open_source import find
from ..sources.source import ShardSource, Source, pictures
from .encode import Encoding, Packed, encoded
from .encoder_threads import Encoder, in_order
from .pieces import CUT, Cut, Pieces, done, name
from .shard_writer import Writer
from .unfinished import PIECE, RUN, SPOOL, WORK, discard, full_told, working

SPOOL_BYTES = 256 << 20
KINDS = {RAW: "arrays", ZSTD: "arrays", JPEG: "images", IMAGE: "images", FILE: "files"}
LOOKS = 100  # samples, until one can be read
SIZES, SIZES_S = 32, 2.0  # samples that are looked at for their size, and for how long
Step = Callable[[int, int], None]  # samples that are done, and bytes


@dataclass
class Report:
    """What was packed. left_out: samples that could not be read, with the reason."""

    meta: DatasetMeta
    seconds: float
    went_on_at: int = 0
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def pack(
    source: Any,
    dest: str | os.PathLike[str],
    labels: Any = None,
    *,
    shard_bytes: int = 256 << 20,
    seed: int = 0,
    workers: int | None = None,
    decode: bool = False,
    resize: int | None = None,
    quality: int = 90,
    compress: bool = False,
    cast: str | None = None,
    apply: Callable[[Any], Any] | None = None,
    statistics: int = 4096,
    on_error: str = "stop",
    fresh: bool = False,
    step: Step | None = None,
) -> Report:
    """Pack ``source`` into the folder ``dest``.

    source: a folder (class folders, or with ``labels`` a CSV), a .npy file or an array (labels:
    another one), a file of another format (formats/, labels: a name in it), a packed set,
    "module:function" or an iterable of arrays or bytes, or of (data, label). shard_bytes: of a
    shard, about. workers: threads; default two a core. decode, resize, quality, compress, cast,
    apply: see Encoding. statistics: samples whose mean and deviation are taken; 0: none. on_error:
    "stop", or "skip" samples that can't be read. fresh: don't go on with what an earlier call has
    left. step: is told what is done; twice from the beginning where a source is first read in its
    order.

    Raises ValueError for a source that can't be packed, or a sample of it; for a ``dest`` that
    holds a set already, or an unfinished one of something else; for a disk that is full.
    """
    how = Encoding(decode, resize, quality, compress, cast, apply)
    began = time.monotonic()
    tell = step or (lambda done, size: None)
    wish = Wish(shard_bytes, seed, statistics, on_error, fresh)
    with packing(source, dest, labels, how, wish, tell) as job:
        report = job.run(workers or 2 * len(os.sched_getaffinity(0)), tell)
    report.seconds = time.monotonic() - began
    return report


@dataclass(frozen=True)
class Wish:
    """What else ``pack`` is told."""

    shard_bytes: int = 256 << 20
    seed: int = 0
    statistics: int = 4096
    on_error: str = "stop"
    fresh: bool = False

    def __post_init__(self) -> None:
        if self.on_error not in ("stop", "skip"):
            raise ValueError(f"pack: on_error={self.on_error!r}. HINT: 'stop' or 'skip'")
        if self.shard_bytes < 1:
            raise ValueError(f"pack: shard_bytes={self.shard_bytes}. HINT: 64 MiB to 1 GiB")


@contextmanager
def packing(
    source: Any, dest: str | os.PathLike[str], labels: Any, how: Encoding, wish: Wish, step: Step
) -> Iterator["Packing"]:
    """The job of packing, ready to be run: its folder is this process's alone, and what can only
    be read in its order is spooled. Raises as ``pack`` does."""
    folder = Path(dest)
    plan = {"source": told(source), "labels": told(labels), "seed": wish.seed, **how.as_json()}
    plan |= {"shard_bytes": wish.shard_bytes, "statistics": wish.statistics}
    with working(folder, plan, wish.fresh) as work, full_told(folder):
        found = find(source, labels, work)
        try:
            if found.in_order:
                found = _spooled(found, work, step)
            if how.apply is not None:
                found.kind = _kind(found, how)
            yield Packing(found, folder, work, how, wish)
        finally:
            found.close()


class Packing:
    """One call's."""

    def __init__(self, source: Source, folder: Path, work: Path, how: Encoding, wish: Wish) -> None:
        self.source, self.folder, self.work, self.how, self.wish = source, folder, work, how, wish
        images, classes = source.kind == "images", source.label == "class"
        self.writer = Writer(folder, work, wish.shard_bytes, images, classes)
        self.samples = len(source)

    @cached_property
    def encoder(self) -> Encoder:
        order = in_order(self.samples, self.wish.seed)
        return encoder(self.source, self.how, self.wish, order)

    def run(self, workers: int, step: Step) -> Report:
        """All that is left, in this process."""
        cut = self._cut()
        if cut is not None:  # ranks have begun with it
            return self._go_on(cut, workers, step)
        start = self.writer.next
        try:
            for at, packed in self.encoder.encoded([(start, self.samples)], workers):
                self.writer.take(packed, at)
                step(at + 1, self.writer.bytes)
            self.writer.close(self.samples)
        finally:
            self.writer.abort()
        return self._finish(start)

    def cut(self, ranks: int) -> Cut:
        """Where the order is cut for so many ranks, or was for those of an earlier call."""
        found = self._cut()
        if found is None:
            size, channels = self._outline()
            places = (self.writer.next, self.samples)
            found = Cut.of(places, size, self.wish.shard_bytes, ranks, channels)
            found.save(self.work)
        return found

    def _cut(self) -> Cut | None:
        """That of an earlier call, if what it begins behind is still there."""
        found = Cut.load(self.work)
        if found is None:
            if (self.work / CUT).exists():  # damaged: where its pieces lie is not known
                self._forget()
            return None
        if (found.first, found.samples) != (self.writer.next, self.samples):
            self._forget()
            return None
        return found

    def _forget(self) -> None:
        """No pieces are kept."""
        for piece in self.work.glob(f"{PIECE}*"):
            discard(piece)

    def done(self, cut: Cut) -> dict[int, tuple[int, int]]:
        """Of each piece that is whole, (samples, bytes)."""
        return done(cut, self.work, self.folder, len(self.writer.shards))

    def join(self, cut: Cut, start: int) -> Report:
        """The set, of pieces that are all whole. start: samples that earlier calls had packed."""
        for piece in range(len(cut)):
            self.writer.adopt(self.work / name(piece))
        return self._finish(start)

    def _go_on(self, cut: Cut, workers: int, step: Step) -> Report:
        """Pack the pieces that ranks have not."""
        there, run = self.done(cut), self.work / f"{RUN}alone"
        start = cut.first + sum(samples for samples, _ in there.values())
        before = self.writer.bytes + sum(size for _, size in there.values())
        writer = self.writer
        pieces = Pieces(cut, self.work, run, writer.limit, writer.images, writer.classes)
        left = [piece for piece in range(len(cut)) if piece not in there]

        def tell() -> None:
            step(start + pieces.samples, before + pieces.bytes)

        run.mkdir()
        try:
            pieces.pack(self.encoder, left, workers, tell)
        finally:
            shutil.rmtree(run, ignore_errors=True)
        return self.join(cut, start)

    def _outline(self) -> tuple[float, tuple[int, ...] | None]:
        """Bytes of a sample, in the mean of some; the shape of their means."""
        statistics, sizes = self.writer.statistics, list[int]()
        until = time.monotonic() + SIZES_S
        first = self.writer.next
        for place in range(first, min(first + SIZES, self.samples)):
            measured = statistics.mean is None and place < self.wish.statistics
            packed = self.encoder.one(int(self.encoder.order[place]), measured)
            if isinstance(packed, Packed):
                sizes.append(packed.length)
                if packed.statistics is not None and statistics.mean is None:
                    statistics = packed.statistics
            if sizes and time.monotonic() > until:
                break
        channels = None if statistics.mean is None else np.shape(statistics.mean)
        return sum(sizes) / max(len(sizes), 1), channels

    def _finish(self, start: int) -> Report:
        if not self.writer.samples:
            self._forget()
            raise ValueError(
                f"{self.source.told}: none of {self.samples:,} samples could be packed"
            )
        meta = self._meta()
        self.writer.finish(meta, self.source.named)
        return Report(meta, 0.0, start, self.writer.left_out, self.source.notes)

    def _meta(self) -> DatasetMeta:
        writer = self.writer
        return DatasetMeta(
            samples=writer.samples,
            shards=writer.shards,
            array=writer.alike,
            label=self.source.label,
            classes=self.source.classes,
            names=self.source.named,
            statistics=writer.statistics.as_json(),
            packed={
                "source": self.source.told,
                "kind": self.source.kind,
                "seed": self.wish.seed,
                "encoding": self.how.as_json(),
                "left_out": len(writer.left_out),
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )


def encoder(source: Source, how: Encoding, wish: Wish, order: Any) -> Encoder:
    return Encoder(source, how, order, wish.statistics, wish.on_error == "skip")


def _kind(source: Source, how: Encoding) -> str:
    """Of what is packed in the place of the source's samples: as the first that can be read."""
    for i in range(min(len(source), LOOKS)):
        try:
            packed = encoded(source.load(i), how, None)
        except (OSError, ValueError, ArithmeticError, MemoryError, EOFError):  # packing says so
            continue
        return "images" if pictures(packed.dtype, packed.shape) else "arrays"
    return source.kind


def _spooled(stream: Source, work: Path, step: Step) -> Source:
    """What has to be read in its order, written down so that it can be read in random order."""
    spool = work / SPOOL
    if not (spool / shard_format.META_FILE).exists():
        shutil.rmtree(spool, ignore_errors=True)
        (spool / WORK).mkdir(parents=True)
        writer = Writer(spool, spool / WORK, SPOOL_BYTES, images=False)
        count, kinds = 0, set()
        try:
            for loaded in stream.each():
                packed = encoded(loaded, Encoding(), stream.label)
                images = packed.encoding == RAW and pictures(packed.dtype, packed.shape)
                kinds.add("images" if images else KINDS[packed.encoding])
                writer.add(packed, count)
                count += 1
                step(count, writer.bytes)
            if len(kinds) != 1:
                some = " and ".join(sorted(kinds)) or "no samples"
                raise ValueError(f"{stream.told}: gives {some}. HINT: samples of one kind")
            writer.close(count)
        finally:
            writer.abort()
        packed_as = {"kind": kinds.pop()}
        meta = DatasetMeta(
            count,
            writer.shards,
            writer.alike,
            stream.label,
            stream.classes,
            stream.named,
            packed=packed_as,
        )
        writer.finish(meta, stream.named)
    source = ShardSource(spool)
    source.told, source.notes = stream.told, stream.notes
    return source


def told(given: Any) -> Any:
    """A source in a plan: a name, or what an array is."""
    if given is None:
        return None
    if isinstance(given, (str, os.PathLike)):
        return os.path.abspath(given) if os.path.exists(given) else os.fspath(given)
    if hasattr(given, "__array__"):
        array = np.asarray(given)
        return f"{array.dtype} {array.shape}"
    if isinstance(given, tuple):
        return [told(one) for one in given]
    return type(given).__name__
