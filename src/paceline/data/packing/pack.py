"""Implement ``paceline pack``: write a folder of files, arrays or a stream as shuffled shards.

One thread writes; other threads read and encode ahead of it. The output depends only on the source
and the seed, not on the number of threads, nor on whether packing was killed and continued. Each
complete shard is kept with its rows in DEST/.packing; the same call continues after the last one.

Several ranks can pack in parallel: the shuffled order is partitioned into pieces (pieces.py;
study/packing starts the ranks), which are joined at the end. With the same seed the result has the
same samples in the same order, each with its row and checksum, and the same statistics except for
the last digits of floating point. Only the shard boundaries depend on the pieces. A call in one
process continues pieces that ranks have begun, too.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...security.text import printable
from ..format import shard_format
from ..format.meta_schema import DatasetMeta
from ..sources.open_source import open_source
from ..sources.source import ShardSource, Source, are_images
from .encode import EncodedSample, EncodingOptions, encode_sample
from .encoder_threads import Encoder, shuffled_order
from .pieces import PARTITION_FILE, Partition, PieceWriter, complete_pieces, piece_name
from .shard_writer import ShardWriter
from .unfinished import (
    PIECE_PREFIX,
    RUN_PREFIX,
    SPOOL_FOLDER,
    WORK_FOLDER,
    discard,
    open_work_folder,
    report_disk_errors,
)

SPOOL_BYTES = 256 << 20
MAX_KIND_PROBES = 100  # samples tried until one can be read
MAX_SIZE_PROBES = 32  # samples read to estimate the mean sample size
MAX_SIZE_PROBE_S = 2.0
ProgressCallback = Callable[[int, int], None]  # called with the samples and bytes done


@dataclass
class PackReport:
    """The result of ``pack``.

    Attributes:
        meta: Contents of the dataset's paceline.json.
        seconds: Duration of the call.
        went_on_at: Number of samples that earlier, interrupted calls had packed.
        left_out: One message for each sample that could not be read, with the reason.
        notes: Other remarks about the source.
    """

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
    follow_links: bool = False,
    step: ProgressCallback | None = None,
) -> PackReport:
    """Pack ``source`` into the folder ``dest``.

    source: a folder (with class folders, or with a CSV as ``labels``), a .npy file or an array
    (``labels``: another one), a file of another format (sources/formats; ``labels``: a name in it),
    a packed dataset, "module:function", or an iterable of arrays or bytes, or of (data, label).
    shard_bytes: target shard size. workers: threads; default two per core. decode, resize,
    quality, compress, cast, apply: see EncodingOptions. statistics: number of samples from which
    mean and deviation are computed; 0: none. on_error: "stop", or "skip" samples that can't be
    read. fresh: discard what an earlier, interrupted call has written. follow_links: also read
    files outside of the source's folder that its links, arrays and ``labels`` refer to. step:
    called with the number of samples and bytes done; for a source that must be spooled it counts
    from 0 twice.

    Raises ValueError if the source or one of its samples can't be packed, if ``dest`` already holds
    a dataset or an unfinished one with other options, and if the disk is full.
    """
    encoding = EncodingOptions(decode, resize, quality, compress, cast, apply)
    began = time.monotonic()
    report_progress = step or (lambda done, size: None)
    options = PackOptions(shard_bytes, seed, statistics, on_error, fresh, follow_links)
    with open_pack_job(source, dest, labels, encoding, options, report_progress) as job:
        report = job.run(workers or 2 * len(os.sched_getaffinity(0)), report_progress)
    report.seconds = time.monotonic() - began
    return report


@dataclass(frozen=True)
class PackOptions:
    """Options of ``pack`` that do not concern the encoding of a sample."""

    shard_bytes: int = 256 << 20
    seed: int = 0
    statistics: int = 4096
    on_error: str = "stop"
    fresh: bool = False
    follow_links: bool = False

    def __post_init__(self) -> None:
        if self.on_error not in ("stop", "skip"):
            raise ValueError(
                f"pack: on_error must be 'stop' or 'skip'; this is {self.on_error!r}. "
                "HINT: on_error='skip' (--on-error skip)"
            )
        if self.shard_bytes < 1:
            raise ValueError(
                f"pack: shard_bytes must be at least 1; this is {self.shard_bytes}. "
                "HINT: shard_bytes=256 << 20 (--shard-size 256M)"
            )


@contextmanager
def open_pack_job(
    source: Any,
    dest: str | os.PathLike[str],
    labels: Any,
    encoding: EncodingOptions,
    options: PackOptions,
    step: ProgressCallback,
) -> Iterator["PackJob"]:
    """Yield a job that is ready to run.

    Its work folder is locked for this process, and a sequential source is spooled first. Raises as
    ``pack`` does.
    """
    folder = Path(dest)
    plan = {
        "source": describe_source(source),
        "labels": describe_source(labels),
        "seed": options.seed,
        **encoding.as_json(),
    }
    plan |= {"shard_bytes": options.shard_bytes, "statistics": options.statistics}
    with open_work_folder(folder, plan, options.fresh) as work, report_disk_errors(folder):
        found = open_source(source, labels, work, options.follow_links)
        try:
            if found.sequential:
                found = _spool(found, work, step)
            if encoding.apply is not None:
                found.kind = kind_after_apply(found, encoding)
            yield PackJob(found, folder, work, encoding, options)
        finally:
            found.close()


class PackJob:
    """One call of ``pack``: its source, work folder, options and writer."""

    def __init__(
        self,
        source: Source,
        folder: Path,
        work: Path,
        encoding: EncodingOptions,
        options: PackOptions,
    ) -> None:
        self.source, self.folder, self.work = source, folder, work
        self.encoding, self.options = encoding, options
        images, classes = source.kind == "images", source.label == "class"
        self.writer = ShardWriter(folder, work, options.shard_bytes, images, classes)
        self.samples = len(source)

    @cached_property
    def encoder(self) -> Encoder:
        order = shuffled_order(self.samples, self.options.seed)
        return make_encoder(self.source, self.encoding, self.options, order)

    def run(self, workers: int, step: ProgressCallback) -> PackReport:
        """Pack all remaining samples in this process."""
        partition = self._load_partition()
        if partition is not None:  # ranks have begun with it
            return self._pack_remaining_pieces(partition, workers, step)
        start = self.writer.next_place
        try:
            for at, packed in self.encoder.encode([(start, self.samples)], workers):
                self.writer.add_or_skip(packed, at)
                step(at + 1, self.writer.bytes)
            self.writer.close(self.samples)
        finally:
            self.writer.abort()
        return self._finish(start)

    def partition(self, ranks: int) -> Partition:
        """Return the partition for ``ranks`` ranks, or the one of an earlier, interrupted call."""
        found = self._load_partition()
        if found is None:
            size, channels = self._measure_samples()
            places = (self.writer.next_place, self.samples)
            found = Partition.of(places, size, self.options.shard_bytes, ranks, channels)
            found.save(self.work)
        return found

    def _load_partition(self) -> Partition | None:
        """Return the partition of an earlier call, if it begins where the kept shards end."""
        found = Partition.load(self.work)
        if found is None:
            if (self.work / PARTITION_FILE).exists():  # damaged: the ranges of pieces are unknown
                self._discard_pieces()
            return None
        if (found.first, found.samples) != (self.writer.next_place, self.samples):
            self._discard_pieces()
            return None
        return found

    def _discard_pieces(self) -> None:
        """Discard all pieces."""
        for piece in self.work.glob(f"{PIECE_PREFIX}*"):
            discard(piece)

    def complete_pieces(self, partition: Partition) -> dict[int, tuple[int, int]]:
        """Return (samples, bytes) of each complete piece."""
        return complete_pieces(partition, self.work, self.folder, len(self.writer.shards))

    def join_pieces(self, partition: Partition, start: int) -> PackReport:
        """Join all pieces, which must be complete. start: samples that earlier calls had packed."""
        for piece in range(len(partition)):
            self.writer.adopt_piece(self.work / piece_name(piece))
        return self._finish(start)

    def _pack_remaining_pieces(
        self, partition: Partition, workers: int, step: ProgressCallback
    ) -> PackReport:
        """Pack the pieces that ranks have not completed, and join all."""
        complete, run = self.complete_pieces(partition), self.work / f"{RUN_PREFIX}alone"
        start = partition.first + sum(samples for samples, _ in complete.values())
        before = self.writer.bytes + sum(size for _, size in complete.values())
        writer = self.writer
        pieces = PieceWriter(
            partition, self.work, run, writer.shard_bytes, writer.images, writer.classes
        )
        left = [piece for piece in range(len(partition)) if piece not in complete]

        def report_progress() -> None:
            step(start + pieces.samples, before + pieces.bytes)

        run.mkdir()
        try:
            pieces.pack(self.encoder, left, workers, report_progress)
        finally:
            discard(run)
        return self.join_pieces(partition, start)

    def _measure_samples(self) -> tuple[float, tuple[int, ...] | None]:
        """Return the mean bytes of a few samples, and the shape of their channel means."""
        statistics, sizes = self.writer.statistics, list[int]()
        until = time.monotonic() + MAX_SIZE_PROBE_S
        first = self.writer.next_place
        for place in range(first, min(first + MAX_SIZE_PROBES, self.samples)):
            in_statistics = statistics.mean is None and place < self.options.statistics
            packed = self.encoder.encode_one(int(self.encoder.order[place]), in_statistics)
            if isinstance(packed, EncodedSample):
                sizes.append(packed.length)
                if packed.statistics is not None and statistics.mean is None:
                    statistics = packed.statistics
            if sizes and time.monotonic() > until:
                break
        channels = None if statistics.mean is None else np.shape(statistics.mean)
        return sum(sizes) / max(len(sizes), 1), channels

    def _finish(self, start: int) -> PackReport:
        if not self.writer.samples:
            self._discard_pieces()
            raise ValueError(
                f"{self.source.description}: none of {self.samples:,} samples could be packed"
            )
        meta = self._meta()
        self.writer.finish(meta, self.source.has_names)
        return PackReport(meta, 0.0, start, self.writer.left_out, self.source.notes)

    def _meta(self) -> DatasetMeta:
        writer = self.writer
        return DatasetMeta(
            samples=writer.samples,
            shards=writer.shards,
            array=writer.common_field,
            label=self.source.label,
            classes=self.source.classes,
            names=self.source.has_names,
            statistics=writer.statistics.as_json(),
            packed={
                "source": self.source.description,
                "kind": self.source.kind,
                "seed": self.options.seed,
                "encoding": self.encoding.as_json(),
                "left_out": len(writer.left_out),
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )


def make_encoder(
    source: Source, encoding: EncodingOptions, options: PackOptions, order: Any
) -> Encoder:
    return Encoder(source, encoding, order, options.statistics, options.on_error == "skip")


def kind_after_apply(source: Source, encoding: EncodingOptions) -> str:
    """Return the kind of the samples after ``apply``, judged by the first that can be read."""
    for i in range(min(len(source), MAX_KIND_PROBES)):
        try:
            packed = encode_sample(source.load(i), encoding, None)
        # Packing reports such a sample.
        except (OSError, ValueError, ArithmeticError, MemoryError, EOFError):
            continue
        return "images" if are_images(packed.dtype, packed.shape) else "arrays"
    return source.kind


def _spool(stream: Source, work: Path, step: ProgressCallback) -> Source:
    """Write a sequential source to the spool, which can be read in random order."""
    spool = work / SPOOL_FOLDER
    if not (spool / shard_format.META_FILE).exists():
        discard(spool)
        (spool / WORK_FOLDER).mkdir(parents=True)
        writer = ShardWriter(spool, spool / WORK_FOLDER, SPOOL_BYTES, images=False)
        count = 0
        try:
            for loaded in stream.each():
                try:
                    stream.check_kind(loaded)
                    packed = encode_sample(loaded, EncodingOptions(), stream.label)
                except ValueError as error:
                    where = printable(f"{stream.description}: sample {count}")
                    raise ValueError(f"{where}: {error}") from error
                writer.add(packed, count)
                count += 1
                step(count, writer.bytes)
            if not count:
                raise ValueError(f"{stream.description} yields no samples")
            writer.close(count)
        finally:
            writer.abort()
        meta = DatasetMeta(
            count,
            writer.shards,
            writer.common_field,
            stream.label,
            stream.classes,
            stream.has_names,
            statistics={},
            packed={"kind": stream.kind},
        )
        writer.finish(meta, stream.has_names)
    source = ShardSource(spool)
    source.description, source.notes = stream.description, stream.notes
    return source


def describe_source(source: Any) -> Any:
    """Return what the plan records of a source or its labels: a path, or an array's description."""
    if source is None:
        return None
    if isinstance(source, (str, os.PathLike)):
        return os.path.abspath(source) if os.path.exists(source) else os.fspath(source)
    if hasattr(source, "__array__"):
        array = np.asarray(source)
        return f"{array.dtype} {array.shape}"
    if isinstance(source, tuple):
        return [describe_source(item) for item in source]
    return type(source).__name__
