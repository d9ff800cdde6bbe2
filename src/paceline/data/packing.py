"""``paceline pack``: a folder of files, arrays or a stream, into shards in random order.

One thread writes, others read and encode ahead of it: what is written depends on the source and
the seed, not on how many they are, nor on whether a kill came between. Each whole shard is kept
with its rows in DEST/.packing; the same call once more goes on behind the last one.
"""

import errno
import fcntl
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from . import shard_format
from .encode import Encoding, Packed, encoded, values
from .shard_format import FILE, IMAGE, JPEG, RAW, ZSTD, Meta
from .sources import ShardSource, Source, find, pictures
from .statistics import Statistics
from .writer import Writer

WORK, PLAN, SPOOL = ".packing", "plan.json", "spool"
SPOOL_BYTES = 256 << 20
KINDS = {RAW: "arrays", ZSTD: "arrays", JPEG: "images", IMAGE: "images", FILE: "files"}
AHEAD_BYTES = 256 << 20  # that are encoded and not yet written, at most
LOOKS = 100  # samples, until one can be read
CHUNK_BYTES = 1 << 20  # about what one thread takes at a time
LITTLE_S = 100e-6  # of a processor, that a sample takes at most where threads are no gain
TRIED = 4  # samples, read without threads to see whether that is faster
UNTIL = 1024  # chunks for threads from one try to the next, at most
Step = Callable[[int, int], None]  # samples that are done, and bytes


@dataclass
class Report:
    """What was packed. left_out: samples that could not be read, with the reason."""

    meta: Meta
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
    if on_error not in ("stop", "skip"):
        raise ValueError(f"pack: on_error={on_error!r}. HINT: 'stop' or 'skip'")
    if shard_bytes < 1:
        raise ValueError(f"pack: shard_bytes={shard_bytes}. HINT: 64 MiB to 1 GiB")
    how = Encoding(decode, resize, quality, compress, cast, apply)
    began = time.monotonic()
    folder = Path(dest)
    plan = {"source": told(source), "labels": told(labels), "seed": seed, **how.as_json()}
    plan |= {"shard_bytes": shard_bytes, "statistics": statistics}
    tell = step or (lambda done, size: None)
    with _working(folder, plan, fresh) as work, _full_told(folder):
        found = find(source, labels, work)
        try:
            if found.in_order:
                found = _spooled(found, work, tell)
            if how.apply is not None:
                found.kind = _kind(found, how)
            job = _Packing(found, folder, work, how, plan, on_error == "skip")
            threads = workers or 2 * len(os.sched_getaffinity(0))
            report = job.run(threads, tell)
        finally:
            found.close()
    report.seconds = time.monotonic() - began
    return report


class _Packing:
    """One call's. skips: whether samples that can't be read are left out."""

    def __init__(
        self, source: Source, folder: Path, work: Path, how: Encoding, plan: Any, skips: bool
    ) -> None:
        self.source, self.how, self.plan, self.skips = source, how, plan, skips
        self.writer = Writer(folder, work, plan["shard_bytes"], source.kind == "images")
        self.statistics = self.writer.statistics

    def run(self, workers: int, step: Step) -> Report:
        try:
            return self._run(workers, step)
        finally:
            self.writer.abort()

    def _run(self, workers: int, step: Step) -> Report:
        samples, start = len(self.source), self.writer.next
        order = np.random.default_rng(self.plan["seed"]).permutation(samples)
        classes = self.statistics.classes if self.source.label == "class" else None
        for at, packed in self._encoded(order, start, workers):
            if isinstance(packed, Packed):
                self.writer.add(packed, at)
                # after it: a shard that ends before it has no part of it
                if classes is not None:
                    classes[packed.label] += 1
                if packed.statistics is not None:
                    self.statistics.merge(packed.statistics)
            else:
                self.writer.left_out.append(packed)
            step(at + 1, self.writer.bytes)
        self.writer.close(samples)
        if not self.writer.samples:
            raise ValueError(f"{self.source.told}: none of {samples:,} samples could be packed")
        meta = self._meta()
        self.writer.finish(meta, self.source.named)
        return Report(meta, 0.0, start, self.writer.left_out, self.source.notes)

    def _encoded(self, order: Any, start: int, workers: int) -> Iterator[tuple[int, Packed | str]]:
        """(place, sample, or why there is none) in order, encoded ahead by threads where that is
        faster."""
        pool = ThreadPoolExecutor(workers, "paceline-pack")
        waiting: deque[tuple[int, Future[list[Packed | str]]]] = deque()
        at, size, each, pace = start, 0.0, 1, _Pace()
        try:
            while at < len(order) or waiting:
                most = max(min(2 * workers, int(AHEAD_BYTES / max(size * each, 1))), 1)
                while at < len(order) and len(waiting) < most and not pace.alone:
                    chunk = order[at : at + each].tolist()
                    waiting.append((at, pool.submit(self._chunk, at, chunk)))
                    at += len(chunk)
                    pace.handed()
                if waiting:
                    first, done = waiting.popleft()
                    found = done.result()
                else:
                    chunk = order[at : at + min(each, pace.most)].tolist()
                    with pace.measured(len(chunk)):
                        first, found = at, self._chunk(at, chunk)
                    at += len(chunk)
                for place, packed in enumerate(found, first):
                    yield place, packed
                    if isinstance(packed, Packed):  # the largest of late says how many at a time
                        size = max(packed.length, 0.9 * size)
                each = int(min(max(CHUNK_BYTES / max(size, 1), 1), 256))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _chunk(self, first: int, chosen: list[int]) -> list[Packed | str]:
        # in random order: the statistics of the first are as good as any's
        measured = self.plan["statistics"] - first
        return [self._one(i, at < measured) for at, i in enumerate(chosen)]

    def _one(self, i: int, measured: bool) -> Packed | str:
        try:
            packed = encoded(self.source.load(i), self.how, self.source.label)
            array = values(packed) if measured else None
        except (OSError, ValueError, EOFError) as error:
            why = f"{self.source.told}: {_reason(error, self.source, i)}"
            if not self.skips:
                raise ValueError(
                    f"{why}. HINT: mend it and say the same again, which goes on here; or "
                    "on_error skip (--on-error skip) leaves out what can't be read"
                ) from error
            return why
        if array is not None:
            packed.statistics = Statistics(self.writer.images)
            packed.statistics.add(array)
        return packed

    def _meta(self) -> Meta:
        writer = self.writer
        return Meta(
            samples=writer.samples,
            shards=writer.shards,
            array=writer.alike,
            label=self.source.label,
            classes=self.source.classes,
            names=self.source.named,
            statistics=self.statistics.as_json(),
            packed={
                "source": self.source.told,
                "kind": self.source.kind,
                "seed": self.plan["seed"],
                "encoding": self.how.as_json(),
                "left_out": len(writer.left_out),
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )


class _Pace:
    """Whether samples are read without threads: where nothing is waited for and a sample takes
    little, threads take longer to hand the interpreter's lock to each other than to do the work.
    Found by a few samples at a time that one thread reads alone; ever less often where it was not
    so. alone: whether the next ones are. most: of them."""

    def __init__(self) -> None:
        self.alone, self.most = True, TRIED
        self._handed, self._until = 0, 1

    def handed(self) -> None:
        """A chunk went to a thread."""
        self._handed += 1
        if self._handed >= self._until:
            self.alone, self._handed, self._until = True, 0, min(2 * self._until, UNTIL)

    @contextmanager
    def measured(self, samples: int) -> Iterator[None]:
        began, used = time.perf_counter(), time.thread_time()
        yield
        took, used = time.perf_counter() - began, time.thread_time() - used
        self.alone = used / samples < LITTLE_S and used > took / 2
        if self.alone:
            self.most, self._until = self.most * 4, 1
        else:
            self.most = TRIED


def _kind(source: Source, how: Encoding) -> str:
    """Of what is packed in the place of the source's samples: as the first that can be read."""
    for i in range(min(len(source), LOOKS)):
        try:
            packed = encoded(source.load(i), how, None)
        except (OSError, ValueError, EOFError):  # packing says so
            continue
        return "images" if pictures(packed.dtype, packed.shape) else "arrays"
    return source.kind


def _reason(error: Exception, source: Source, i: int) -> str:
    """What is wrong with which sample."""
    name = source.name(i)
    where = f"{name} (sample {i})" if name else f"sample {i}"
    if isinstance(error, FileNotFoundError):
        return f"{where} has vanished"
    return f"{where}: {getattr(error, 'strerror', None) or error}"


def _spooled(stream: Source, work: Path, step: Step) -> Source:
    """What has to be read in its order, written down so that it can be read in random order."""
    spool = work / SPOOL
    if not (spool / shard_format.META).exists():
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
        meta = Meta(
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


@contextmanager
def _working(folder: Path, plan: dict[str, Any], fresh: bool) -> Iterator[Path]:
    """The folder of what is not whole yet, this process's alone."""
    work = folder / WORK
    if (folder / shard_format.META).exists() and not fresh:
        raise ValueError(
            f"{folder}: holds a packed set. HINT: another folder, or fresh=True (--fresh), which "
            "packs it anew"
        )
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / "lock").open("a")
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror}. HINT: a folder to write to") from None
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"{folder}: is being packed by another process. HINT: wait for it, or take "
                "another folder"
            ) from None
        if fresh or not _kept(work):
            _cleared(folder, work)
        before = _plan(work)
        odd = sorted(name for name in plan if before and plan[name] != before.get(name))
        if odd:
            raise ValueError(
                f"{folder}: holds what an earlier call has packed so far, with other "
                f"{', '.join(odd)}. HINT: the same as then, or fresh=True (--fresh)"
            )
        (work / PLAN).write_text(json.dumps(plan))
        try:
            yield work
        except BaseException:
            if not _kept(work):  # a mistake, mostly: nothing of it is left
                shutil.rmtree(work, ignore_errors=True)
            raise
    shutil.rmtree(work, ignore_errors=True)


def _kept(work: Path) -> bool:
    """Whether there is something that a call can go on with."""
    return any(work.glob("shard-*.json")) or (work / SPOOL / shard_format.META).exists()


def _plan(work: Path) -> Any:
    try:
        return json.loads((work / PLAN).read_text())
    except (OSError, ValueError):
        return None


def _cleared(folder: Path, work: Path) -> None:
    """Of what Paceline has written, nothing is left; of other files, all."""
    ours: Iterable[Path] = (*folder.glob("shard-[0-9]*.bin"), folder / shard_format.INDEX)
    for path in (folder / shard_format.META, *ours, folder / shard_format.NAMES):
        path.unlink(missing_ok=True)
    for path in work.iterdir():
        if path.name != "lock":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def _full_told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        room = "make room, and " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise ValueError(
            f"{error.filename or folder}: {error.strerror or error}. What is packed so far is "
            f"kept. HINT: {room}say the same again, which goes on where it was"
        ) from error


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
