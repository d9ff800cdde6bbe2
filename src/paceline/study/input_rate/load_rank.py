"""One rank that only loads data; ``paceline check --data`` compares its prediction with such ranks.

    python -m paceline.study.input_rate.load_rank '{"source": ..., "rank": 0, "ranks": 2, ...}'

The rank prints "ready" when it has its first batch, waits for a line on standard input, loads for
``LoadRankConfig.seconds`` and prints the number of samples and seconds as JSON.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from itertools import chain, islice, repeat
from typing import Any

import numpy as np

from ...data.format.shard_format import META_FILE
from ...data.loading.batch import SamplePipeline
from ...data.loading.external_transforms import adapt_transform
from ...data.loading.file_dataset import Files
from ...data.loading.loader import Loader
from ...data.loading.stored_arrays import StoredArrays, is_stored_array
from ...data.shards import Shards
from ...data.sources import formats
from ...data.sources.open_source import import_function
from ...security.processes import python_command

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
        # runpy warns because the package has already imported this module.
        quiet = ("-W", "ignore::RuntimeWarning:runpy")
        return python_command(*quiet, "-m", __name__, json.dumps(asdict(self)))


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
    blocks = in_blocks(data)
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


def in_blocks(data: Any) -> bool:
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
