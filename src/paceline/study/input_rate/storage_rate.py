"""Storage terms of the input rate, each measured on files dropped from the page cache."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ...data.loading.file_dataset import Files
from ...data.shards import ScratchBuffer
from ...data.sources.bounded_read import OPEN_FLAGS
from ..probe.measure import page_cache
from ..probe.measure.storage import storage
from .sample_files import MIN_SAMPLES, Place, files_of, together

PIECE = 4 << 20  # bytes per read when measuring the maximum bandwidth
PARALLEL_READS = 16  # concurrent reads when measuring operations per second
DROPPED = 0.1  # maximum cached fraction of files that count as dropped from the page cache


def from_storage(data: Any, some: list[Place], seconds: float, notes: list[str]) -> dict[str, Any]:
    """Measure the storage terms; empty if the files can't be dropped from the page cache.

    Args:
        some: Places to read.
        seconds: Approximate time for each measurement.
        notes: Remarks are appended to it.
    """
    if not drop_from_cache(some):
        notes.append("its files are in memory, or in a cache that this host can't empty")
        return {}
    files, count = isinstance(data, Files), together(data)
    one, one_cpu = _pieces(some[::2], 1, seconds / 2, files)
    drop_from_cache(some)
    many, many_cpu = _pieces(some, PARALLEL_READS, seconds, files)
    warm_cpu = _pieces(some[: max(len(some) // 8, 1)], 1, seconds / 4, files)[1]
    each = sum(length for _, _, length in some) / len(some)
    drop_from_cache(some)
    large = _bandwidth_beside(data, seconds, notes) if files else _large(files_of(data), seconds)
    return {
        "bandwidth": max(large, many * each),
        "operations": many * count,
        "wait_s": max(1 / one - one_cpu, 0.0) / count,
        "stored_s": max(min(one_cpu, many_cpu) - warm_cpu, 0.0) / count,
    }


def drop_from_cache(some: list[Place]) -> bool:
    """Drop the files from the page cache; return whether that succeeded."""
    left = []
    for number, path in enumerate(sorted({path for path, _, _ in some})):
        with open(os.open(path, OPEN_FLAGS), "rb") as file:
            os.fsync(file.fileno())
            page_cache.drop_from_cache(file.fileno())
            if number < MIN_SAMPLES:
                left.append(page_cache.resident_share(file.fileno()))
    known = [part for part in left if part is not None]
    return bool(known) and sum(known) / len(known) < DROPPED


def _pieces(some: list[Place], count: int, seconds: float, opens: bool) -> tuple[float, float]:
    """Read places with ``count`` threads; return the reads per second and CPU seconds per read."""
    paths = set() if opens else {path for path, _, _ in some}
    handles = {path: os.open(path, OPEN_FLAGS) for path in paths}
    end = time.perf_counter() + seconds

    def read(mine: list[Place]) -> int:
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
        done = sum(pool.map(read, [some[i::count] for i in range(count)]))
    took, used = time.perf_counter() - start, time.process_time() - used
    for file in handles.values():
        os.close(file)
    return done / took, used / done


def _large(files: list[Path], seconds: float) -> float:
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
