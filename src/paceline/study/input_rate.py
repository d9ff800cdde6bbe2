"""``paceline check --data DATASET``: find what limits the input rate of a dataset on this host.

Each term is measured separately, and the prediction is compared with running loaders: with ranks
that only load data, ``python -m paceline.study.input_rate '{"source": ..., "rank": 0, ...}'``. Such
a rank prints "ready" when it has its first batch, waits for a line on standard input, loads for
``LoadRankConfig.seconds`` and prints the number of samples and seconds as JSON.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np

from ..cluster.topology.local_resources import file_system_type
from ..data.format.shard_format import META_FILE
from ..data.loading.batch import SamplePipeline, make_piece
from ..data.loading.external_transforms import adapt_transform
from ..data.loading.file_dataset import Files
from ..data.loading.loader import Loader
from ..data.loading.stored_arrays import CACHE_BYTES, StoredArrays, is_stored_array
from ..data.shards import ScratchBuffer, Shards
from ..data.sources import formats
from ..data.sources.bounded_read import OPEN_FLAGS
from ..data.sources.open_source import import_function
from ..plurals import counted
from ..predict.input_rate import (
    Rate,
    RateRemedy,
    Terms,
    nodes_until_storage_limit,
    rate,
    remedies,
    striping,
)
from ..record.ring.memory_sampler import memory_left
from ..security.processes import python_command
from .probe.measure import page_cache
from .probe.measure.storage import storage

MODULE = "paceline.study.input_rate"
Say = Callable[[str], None]
Running = list["subprocess.Popen[str]"]
PIECE = 4 << 20  # bytes per read when measuring the maximum bandwidth
PARALLEL_READS = 16  # concurrent reads when measuring operations per second
DROPPED = 0.1  # maximum cached fraction of files that count as dropped from the page cache


# One rank that only loads data.

BATCH_BYTES, BATCH = 32 << 20, 64
INSPECTED_SAMPLES = 16  # samples whose shapes are compared
PREFETCH_BATCHES = 2  # prefetched batches
MIN_BATCHES = 10  # minimum number of batches in a rank's pass


@dataclass(frozen=True)
class LoadRankConfig:
    """What to load, and how.

    Attributes:
        source: Path of the dataset.
        transform: "MODULE:FUNCTION".
        threads: Loader threads of each rank.
        seconds: Duration of the measurement.
        most: Maximum number of samples, of all ranks together.
        cores: CPUs that the rank is bound to; empty keeps the binding of the parent process.
        again: Measure from memory: load all samples once before the clock starts, and start again
            after the last sample.
    """

    source: str
    labels: str | None = None
    transform: str | None = None
    threads: int = 2
    rank: int = 0
    ranks: int = 1
    seconds: float = 2.0
    most: int | None = None
    cores: tuple[int, ...] = ()
    again: bool = True

    def words(self) -> list[str]:
        return python_command("-m", MODULE, json.dumps(asdict(self)))


def open_dataset(feed: LoadRankConfig) -> Any:
    """Open the dataset. Links are followed: samples are measured, and not kept.

    Raises:
        ValueError: A Loader can't read the source without packing it.
    """
    path, _ = formats.split_path(feed.source)
    if is_stored_array(feed.source):
        return StoredArrays(feed.source, feed.labels, follow_links=True)
    if (path / META_FILE).exists():
        return Shards(path)
    if formats.detect_format(path):
        raise ValueError(
            f"{feed.source}: a Loader can't read {formats.detect_format(path)}. HINT: paceline "
            f"pack {feed.source} DEST, then paceline check --data DEST"
        )
    return Files(path, feed.labels, follow_links=True)


def make_loader(feed: LoadRankConfig, data: Any) -> Loader:
    """Return a loader of this rank's part of the samples, in the same order as in training.

    Datasets stored in chunks of several samples are shuffled in blocks, others sample by sample.
    """
    change = import_function(feed.transform, "--transform") if feed.transform else None
    blocks = is_chunked(data)
    whole = Loader(data, shuffle="blocks" if blocks else True, transform=change, num_workers=0)
    size, shapes = _sample_size_and_shapes(data, change)
    each = min(len(data), feed.most or len(data)) // feed.ranks
    batch = max(min(BATCH_BYTES // max(size, 1), BATCH, each // MIN_BATCHES), 1)
    return Loader(
        data,
        batch,
        sampler=list(islice(iter(whole.sampler), feed.rank, feed.most, feed.ranks)),
        num_workers=feed.threads,
        prefetch_factor=PREFETCH_BATCHES,
        transform=change,
        collate_fn=collate_as_list
        if shapes > 1 or (change is None and _shapes_may_differ(data))
        else None,
        drop_last=True,
    )


def is_chunked(data: Any) -> bool:
    return isinstance(data, StoredArrays) and data.chunk_samples > 1


def _sample_size_and_shapes(data: Any, change: Any) -> tuple[int, int]:
    """Return the maximum bytes of a decoded sample, and the number of shapes, of some samples."""
    step = max(len(data) // INSPECTED_SAMPLES, 1)
    recipe = SamplePipeline(data, adapt_transform(change), None, 0, False, False)
    try:
        samples = [recipe.sample((0, i))[0] for i in range(0, len(data), step)]
    except ValueError:
        raise
    except Exception as error:  # the user's own transform
        why = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        raise ValueError(why) from error
    sizes = [item.nbytes if isinstance(item, np.ndarray) else len(item) for item in samples]
    return max(sizes), len({np.shape(item) for item in samples})


def _shapes_may_differ(data: Any) -> bool:
    """Return whether samples may have other shapes than those examined."""
    return isinstance(data, Files) or (isinstance(data, Shards) and data.meta.array is None)


def collate_as_list(samples: list[Any]) -> list[Any]:
    return samples


# Positions of a dataset's samples in files, and the choice of samples to measure with.

MAX_BYTES = 1 << 30  # maximum bytes of the samples used, so that they fit into memory
MAX_SAMPLES = 20_000  # maximum number of samples used
MIN_SAMPLES = 100  # minimum number of samples: fewer are read too quickly to be timed
Extent = tuple[Path, int, int]  # file, offset, bytes
KINDS: dict[type, str] = {Files: "files", StoredArrays: "store", Shards: "packed"}


def files_of(data: Any) -> list[Path]:
    """Return all files of a dataset. Not for ``Files``, which may have millions of them."""
    if isinstance(data, Shards):
        return [data.shard_path(number) for number in range(len(data.meta.shards))]
    path: Path = data.path
    return (
        [path] if path.is_file() else sorted(entry for entry in path.rglob("*") if entry.is_file())
    )


def size_of(data: Any) -> int:
    """Return the bytes of the dataset; for ``Files`` estimated from some of the samples."""
    if isinstance(data, Files):
        step = max(len(data) // MIN_SAMPLES, 1)
        sizes = [data.location(i)[2] for i in range(0, len(data), step)]
        return round(sum(sizes) / len(sizes) * len(data))
    return sum(path.stat().st_size for path in files_of(data))


def samples_to_measure(data: Any) -> int:
    """Return the number of samples to measure with.

    They fit into memory and are read in an acceptable time. For a store that caches decoded chunks,
    they are more than the cache holds.
    """
    if isinstance(data, StoredArrays):
        return min(len(data), 2 * CACHE_BYTES // max(data.array_spec.nbytes, 1) + 1)
    return min(
        len(data), max(MAX_BYTES * len(data) // max(size_of(data), 1), MIN_SAMPLES), MAX_SAMPLES
    )


def sample_extents(data: Any, feed: LoadRankConfig) -> list[Extent]:
    """Return the file, offset and bytes of the samples to measure with, in reading order.

    A store's files are treated as consecutive chunks that are read in random order.
    """
    if not isinstance(data, StoredArrays):
        return [data.location(i) for i in order_of(data, feed)]
    files = [(path, path.stat().st_size) for path in files_of(data)]
    each = max(sum(size for _, size in files) * data.chunk_samples // len(data), 1)
    found = [
        (path, start, min(each, size - start))
        for path, size in files
        for start in range(0, size, each)
    ]
    random.Random(0).shuffle(found)
    return found[: max(MAX_BYTES // each, 1)]


def samples_per_extent(data: Any) -> int:
    """Return the number of samples that are stored together in one place."""
    return data.chunk_samples if isinstance(data, StoredArrays) else 1


def order_of(data: Any, feed: LoadRankConfig) -> list[int]:
    return list(make_loader(replace(feed, rank=0, ranks=1), data).sampler)


# Storage terms of the input rate, each measured on files dropped from the page cache.


def measure_storage(
    data: Any, extents: list[Extent], seconds: float, notes: list[str]
) -> dict[str, Any]:
    """Measure the storage terms; empty if the files can't be dropped from the page cache.

    Args:
        extents: What to read.
        seconds: Approximate time for each measurement.
        notes: Remarks are appended to it.
    """
    if not drop_from_cache(extents):
        notes.append("its files are in memory, or in a cache that this host can't empty")
        return {}
    files, count = isinstance(data, Files), samples_per_extent(data)
    single_rate, single_cpu_s = _small_reads(extents[::2], 1, seconds / 2, files)
    drop_from_cache(extents)
    parallel_rate, parallel_cpu_s = _small_reads(extents, PARALLEL_READS, seconds, files)
    warm_cpu_s = _small_reads(extents[: max(len(extents) // 8, 1)], 1, seconds / 4, files)[1]
    each = sum(length for _, _, length in extents) / len(extents)
    drop_from_cache(extents)
    large = (
        _bandwidth_beside(data, seconds, notes) if files else _large_reads(files_of(data), seconds)
    )
    return {
        "bandwidth": max(large, parallel_rate * each),
        "operations": parallel_rate * count,
        "wait_s": max(1 / single_rate - single_cpu_s, 0.0) / count,
        "stored_s": max(min(single_cpu_s, parallel_cpu_s) - warm_cpu_s, 0.0) / count,
    }


def drop_from_cache(extents: list[Extent]) -> bool:
    """Drop the files from the page cache; return whether that succeeded."""
    kept = page_cache.drop_files(sorted({path for path, _, _ in extents}))
    return kept is not None and kept < DROPPED


def _small_reads(
    extents: list[Extent], count: int, seconds: float, opens: bool
) -> tuple[float, float]:
    """Read extents with ``count`` threads; return the reads per second and CPU seconds per read."""
    paths = set() if opens else {path for path, _, _ in extents}
    handles = {path: os.open(path, OPEN_FLAGS) for path in paths}
    end = time.perf_counter() + seconds

    def read(mine: list[Extent]) -> int:
        buffer, done = ScratchBuffer(), 0
        for path, offset, length in mine:
            file = os.open(path, OPEN_FLAGS) if opens else handles[path]
            os.preadv(file, [buffer.take(length)], offset)
            if opens:
                os.close(file)
            done += 1
            if time.perf_counter() > end:
                break
        return done

    start, used = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(count) as pool:
        done = sum(pool.map(read, [extents[i::count] for i in range(count)]))
    took, used = time.perf_counter() - start, time.process_time() - used
    for file in handles.values():
        os.close(file)
    return done / took, used / done


def _large_reads(files: list[Path], seconds: float) -> float:
    """Return the bytes per second of sequential reads in large pieces."""
    buffer, done = memoryview(bytearray(PIECE)), 0
    start = time.perf_counter()
    for path in files:
        with open(os.open(path, OPEN_FLAGS), "rb", buffering=0) as file:
            while time.perf_counter() - start < seconds and (count := file.readinto(buffer)):
                done += count
    return done / (time.perf_counter() - start)


def _bandwidth_beside(data: Files, seconds: float, notes: list[str]) -> float:
    """Return the bandwidth of a temporary large file in the same folder as the small files."""
    try:
        read = storage(data.folder, seconds).read
    except ValueError as error:
        notes.append(f"its bandwidth was measured with small files only: {error}")
        return 0.0
    return read.median if read is not None else 0.0


# Loaders running on all ranks at once, without training, to compare a prediction with.


def measure_rates(feed: LoadRankConfig, data: Any, extents: list[Extent], state: str) -> float:
    """Measure the samples per second of all ranks together, from "storage" or "memory"."""
    stored = state == "storage"
    cores = cores_of_ranks(feed.ranks)
    feeds = [replace(feed, rank=r, cores=cores[r], again=not stored) for r in range(feed.ranks)]
    if not stored:
        return measure_run(feeds)
    return measure_run(feeds, lambda: drop_dataset_from_cache(data, extents))


def measure_run(feeds: list[LoadRankConfig], before: Callable[[], object] = lambda: None) -> float:
    """Run one process per feed; return their samples per second together.

    ``before`` is called when all processes are ready, before the measurement starts.
    """
    running = start_ranks(feeds)
    try:
        before()
        begin_loading(running)
        found = [json.loads(_line(process) or "{}") for process in running]
    finally:
        end_ranks(running)
    return float(
        sum(result["samples"] / result["seconds"] for result in found if result.get("samples"))
    )


def cores_of_ranks(ranks: int) -> list[tuple[int, ...]]:
    """Return the CPUs of each rank as a launcher binds them: several each, or one shared."""
    mine = sorted(os.sched_getaffinity(0))
    each = max(len(mine) // ranks, 1)
    return [tuple(mine[rank * each % len(mine) :][:each]) for rank in range(ranks)]


def start_ranks(feeds: list[LoadRankConfig]) -> Running:
    """Start the processes and wait for their first batches.

    Raises:
        ValueError: A process failed.
    """
    running: Running = []
    try:
        running.extend(
            subprocess.Popen(feed.words(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for feed in feeds
        )
        for process in running:
            if _line(process) != "ready":
                raise ValueError("a loading rank has failed; its error is above")
    except BaseException:
        end_ranks(running)
        raise
    return running


def begin_loading(running: Running) -> None:
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def end_ranks(running: Running) -> None:
    for process in running:
        process.kill()
        process.wait()


def drop_dataset_from_cache(data: Any, extents: list[Extent]) -> bool:
    """Drop every file that contains samples from the page cache; return whether that succeeded."""
    others = [] if isinstance(data, Files) else files_of(data)
    return drop_from_cache([*extents, *((path, 0, 0) for path in others)])


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


# CPU time per sample when the files are in the page cache.

# Maximum threads of the process that measures one loader on all cores, and maximum number of
# processes that measure the cost per sample while all cores are busy.
MAX_THREADS = 8
MANY = 10_000


def measure_cpu_time(feed: LoadRankConfig, data: Any, extents: list[Extent]) -> Terms:
    """Measure the CPU seconds per sample and its parts, and the rate of one process on all cores.

    The cost per sample is that of one core while the other cores are equally busy. It is measured
    in new processes with loaders as in training, so that state of this process has no effect.
    """
    mine = sorted(os.sched_getaffinity(0))
    alone = replace(feed, rank=0, ranks=1)
    samples_s = measure_run([replace(alone, threads=min(len(mine), MAX_THREADS))])
    each = [replace(alone, cores=(core,)) for core in mine[:MAX_THREADS]]
    core_s = len(each) / measure_run(each)
    read_s, plain_s, whole_s, first_s = _cpu_parts(feed, data)
    scale = core_s / whole_s
    return Terms(
        samples=len(data),
        bytes=sum(length for _, _, length in extents) / len(extents) / samples_per_extent(data),
        cores=len(mine),
        read_s=scale * read_s,
        decode_s=scale * (plain_s - read_s),
        transform_s=scale * (whole_s - plain_s),
        alone=samples_s,
        stored_s=scale * first_s,
        kind=KINDS[type(data)],
        chunk=samples_per_extent(data),
        decoded=data.array_spec.nbytes if isinstance(data, StoredArrays) else 0.0,
    )


def _cpu_parts(feed: LoadRankConfig, data: Any) -> tuple[float, float, float, float]:
    """Return CPU seconds per sample of one thread, each value including the previous ones.

    The first three are: read; read and decoded; read, decoded and transformed. The fourth is the
    additional cost of the first pass.
    """
    change = import_function(feed.transform, "--transform") if feed.transform else None
    order, budget = order_of(data, feed), feed.seconds / 3
    first = plain = _timed(lambda i: data.read(i, _scratch), order, budget)
    read = plain
    if isinstance(data, Shards):
        read = _timed(lambda i: data.read_raw(i, _scratch), order, budget)
    elif isinstance(data, Files):
        read = _timed(lambda i: data.location(i)[0].read_bytes(), order, budget)
    else:
        read = _timed(lambda i: data.read(i, _scratch), order[:1] * MANY, budget)
        if data.kept:  # from the second pass on
            plain = read
    whole = plain
    if change is not None:
        recipe = SamplePipeline(data, adapt_transform(change), collate_as_list, 0, False, False)
        whole = max(_timed(lambda i: make_piece(recipe, [(0, i)], [], 0), order, budget), plain)
    return min(read, plain), plain, whole, first - plain


_scratch = ScratchBuffer()


def _timed(call: Callable[[int], Any], order: list[int], seconds: float) -> float:
    call(order[0])
    start, done = time.thread_time(), 0
    for i in order:
        call(i)
        done += 1
        if time.thread_time() - start > seconds:
            break
    return (time.thread_time() - start) / done


@dataclass(frozen=True)
class Advice:
    """Measured and predicted input rates of a dataset.

    Attributes:
        feed: What was loaded, and how.
        filesystem: Type of the dataset's file system.
        terms: The measured terms of the prediction.
        rates: Predicted rates for several numbers of ranks, by state ("storage", "memory").
        measured: Measured samples per second of ``feed.ranks`` ranks, by state.
        remedies: Changes with their predicted effects.
        fits: Whether the dataset fits into memory.
        hosts: Number of hosts from which on the storage is the limit; None if not measured.
        notes: Remarks as text.
    """

    feed: LoadRankConfig
    filesystem: str
    terms: Terms
    rates: dict[str, list[Rate]]
    measured: dict[str, float]
    remedies: list[RateRemedy]
    fits: bool
    hosts: int | None
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        feed, values = self.feed, asdict(self)
        del values["feed"]
        return {
            "format": "paceline-feeding",
            "version": 1,
            "source": feed.source,
            "transform": feed.transform,
            "ranks": feed.ranks,
            "threads": feed.threads,
            **values,
        }


def advise(feed: LoadRankConfig, say: Say) -> Advice:
    """Measure the terms of a dataset's input rate, predict the rates and measure loaders.

    Args:
        say: Called with a line of progress before each step.

    Raises:
        ValueError: The source is not a dataset, or too small to be measured.
    """
    data = open_dataset(feed)
    if feed.ranks < 1:
        raise ValueError(f"-n must be at least 1; this is {feed.ranks}. HINT: -n 1")
    feed = replace(feed, most=samples_to_measure(data))
    least = max(MIN_SAMPLES, MIN_BATCHES * feed.ranks)
    if len(data) < least:
        raise ValueError(
            f"{data!r} has too few samples to measure. HINT: use a dataset of {least} or more"
        )
    say(f"{data!r}")
    extents = sample_extents(data, feed)
    root: Path = data.folder if isinstance(data, (Shards, Files)) else data.path
    root = root if root.is_dir() else root.parent
    filesystem, notes = file_system_type(root), list[str]()
    say("reading from storage")
    from_disk = measure_storage(data, extents, feed.seconds, notes)
    if from_disk:  # so that the files are in the page cache as after a first epoch
        drop_dataset_from_cache(data, extents)
    say("reading from memory, decoding, transforming")
    terms = measure_cpu_time(feed, data, extents)
    first_pass_s = terms.stored_s + from_disk.pop("stored_s", 0.0)
    terms = replace(terms, stored_s=first_pass_s, **from_disk)
    states = ["storage", "memory"] if terms.stored else ["memory"]
    found = {state: _rates(terms, feed, state == "storage") for state in states}
    measured = {}
    for state in states:
        say(f"loading on {counted(feed.ranks, 'rank')}, from {state}")
        measured[state] = measure_rates(feed, data, extents, state)
    proposed = remedies(terms, feed.ranks, feed.threads, terms.stored)
    shard = (
        max((shard.bytes for shard in data.meta.shards), default=0)
        if isinstance(data, Shards)
        else 0
    )
    stripes = striping(filesystem, shard)
    notes += [stripes] if stripes else []
    fits = size_of(data) < memory_left()
    over = nodes_until_storage_limit(terms, feed.ranks, feed.threads) if terms.stored else None
    return Advice(feed, filesystem, terms, found, measured, proposed, fits, over, notes)


def _rates(terms: Terms, feed: LoadRankConfig, stored: bool) -> list[Rate]:
    ranks = sorted({1, 2, 4, terms.cores, feed.ranks})
    most = max(terms.cores, feed.ranks)
    return [rate(terms, rank, feed.threads, stored) for rank in ranks if rank <= most]


def main() -> None:
    feed, parent = LoadRankConfig(**json.loads(sys.argv[1])), os.getppid()
    if feed.cores:
        os.sched_setaffinity(0, feed.cores)
    source = make_loader(feed, open_dataset(feed))
    if feed.again:
        for _ in source:
            pass
    batches = iter(source)
    next(batches)
    print("ready", flush=True)
    if not sys.stdin.readline():
        return
    for _ in range(PREFETCH_BATCHES):  # prefetched before the clock starts
        next(batches)
    samples, start = 0, time.perf_counter()
    end = start
    more = repeat(source) if feed.again else ()
    for _ in chain(batches, chain.from_iterable(more)):
        samples += source.batch_size or 1
        end = time.perf_counter()
        if end - start > feed.seconds or os.getppid() != parent:  # the parent was killed
            break
    print(json.dumps({"samples": samples, "seconds": end - start}), flush=True)


if __name__ == "__main__":
    main()
