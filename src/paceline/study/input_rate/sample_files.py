"""Positions of a dataset's samples in files, and the choice of samples to measure with."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...data.loading.file_dataset import Files
from ...data.loading.stored_arrays import CACHE_BYTES, StoredArrays
from ...data.shards import Shards
from .load_rank import LoadRankConfig, make_loader

MAX_BYTES = 1 << 30  # maximum bytes of the samples used, so that they fit into memory
MAX_SAMPLES = 20_000  # maximum number of samples used
MIN_SAMPLES = 100  # minimum number of samples: fewer are read too quickly to be timed
Place = tuple[Path, int, int]  # file, offset, bytes


def root_of(data: Any) -> Path:
    path: Path = data.folder if isinstance(data, (Shards, Files)) else data.path
    return path if path.is_dir() else path.parent


def files_of(data: Any) -> list[Path]:
    """Return all files of a dataset. Not for ``Files``, which may have millions of them."""
    if isinstance(data, Shards):
        return [data.shard_path(number) for number in range(len(data.meta.shards))]
    path: Path = data.path
    return [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())


def size_of(data: Any) -> int:
    """Return the bytes of the dataset; for ``Files`` estimated from some of the samples."""
    if isinstance(data, Files):
        step = max(len(data) // MIN_SAMPLES, 1)
        looked = [data.location(i)[2] for i in range(0, len(data), step)]
        return round(sum(looked) / len(looked) * len(data))
    return sum(path.stat().st_size for path in files_of(data))


def most_of(data: Any) -> int:
    """Return the number of samples to measure with.

    They fit into memory and are read in an acceptable time. For a store that caches decoded chunks,
    they are more than the cache holds.
    """
    if isinstance(data, StoredArrays):
        return min(len(data), 2 * CACHE_BYTES // max(data.array_spec.nbytes, 1) + 1)
    return min(
        len(data), max(MAX_BYTES * len(data) // max(size_of(data), 1), MIN_SAMPLES), MAX_SAMPLES
    )


def places(data: Any, feed: LoadRankConfig) -> list[Place]:
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


def together(data: Any) -> int:
    """Return the number of samples that are stored together in one place."""
    return data.chunk_samples if isinstance(data, StoredArrays) else 1


def order_of(data: Any, feed: LoadRankConfig) -> list[int]:
    return list(make_loader(replace(feed, rank=0, ranks=1), data).sampler)
