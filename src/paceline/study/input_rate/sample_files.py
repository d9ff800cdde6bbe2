"""Where a set's samples lie, and which of them are looked at."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...data.loading.file_dataset import Files
from ...data.loading.stored_arrays import CACHE_BYTES, StoredArrays
from ...data.shards import Shards
from .load_rank import Feed, loader

MOST_BYTES = 1 << 30  # of samples that are looked at, so that memory holds them
MOST = 20_000  # of them
LEAST = 100  # samples: fewer are read before a clock says anything
Place = tuple[Path, int, int]  # file, offset, bytes


def root_of(data: Any) -> Path:
    path: Path = data.folder if isinstance(data, (Shards, Files)) else data.path
    return path if path.is_dir() else path.parent


def files_of(data: Any) -> list[Path]:
    """All, but those of ``Files``, of which there may be millions."""
    if isinstance(data, Shards):
        return [data.shard_path(number) for number in range(len(data.meta.shards))]
    path: Path = data.path
    return [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())


def size_of(data: Any) -> int:
    """Bytes of the whole set, by some of it."""
    if isinstance(data, Files):
        step = max(len(data) // LEAST, 1)
        looked = [data.location(i)[2] for i in range(0, len(data), step)]
        return round(sum(looked) / len(looked) * len(data))
    return sum(path.stat().st_size for path in files_of(data))


def most_of(data: Any) -> int:
    """Samples that memory holds, in a time that one waits; of a store whose chunks are kept
    unpacked, more than that keeps."""
    if isinstance(data, StoredArrays):
        return min(len(data), 2 * CACHE_BYTES // max(data.array_spec.nbytes, 1) + 1)
    return min(len(data), max(MOST_BYTES * len(data) // max(size_of(data), 1), LEAST), MOST)


def places(data: Any, feed: Feed) -> list[Place]:
    """Of the samples that are looked at, in their order. A store's files are taken for chunks one
    after the other, of which any may be next."""
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
    return found[: max(MOST_BYTES // each, 1)]


def together(data: Any) -> int:
    """Samples that lie at one place."""
    return data.chunk_samples if isinstance(data, StoredArrays) else 1


def order_of(data: Any, feed: Feed) -> list[int]:
    return list(loader(replace(feed, rank=0, ranks=1), data).sampler)
