"""Verify a packed dataset (``paceline pack --check``): read every byte, decode every sample."""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from .format.shard_format import FILE, DataError
from .shards import ScratchBuffer, Shards

CHUNK = 64


def verify(
    folder: str | os.PathLike[str],
    workers: int | None = None,
    step: Callable[[int, int], None] | None = None,
) -> list[DataError]:
    """Return the errors of all damaged samples, and of index.bin and names.txt as whole files.

    Verification continues after an error. step: called with the samples and bytes verified so far.
    Raises DataError if the folder holds no dataset.
    """
    shards = Shards(Path(folder))
    waiting: deque[Future[tuple[int, list[DataError]]]] = deque()
    found = shards.check_files()
    done = size = at = 0
    workers = workers or len(os.sched_getaffinity(0))
    pool = ThreadPoolExecutor(workers, "paceline-check")
    try:
        while at < len(shards) or waiting:
            while at < len(shards) and len(waiting) < 2 * workers:
                waiting.append(pool.submit(_chunk, shards, range(at, min(at + CHUNK, len(shards)))))
                at += CHUNK
            read, bad = waiting.popleft().result()
            found += bad
            done, size = min(done + CHUNK, len(shards)), size + read
            if step is not None:
                step(done, size)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return found


def _chunk(shards: Shards, chosen: range) -> tuple[int, list[DataError]]:
    scratch, size, bad = ScratchBuffer(), 0, []
    for i in chosen:
        try:
            row, data, _ = shards.read_raw(i, scratch)
            size += row.length
            if row.encoding != FILE:
                shards.decode_sample(i, row, data)
        except DataError as error:
            bad.append(error.with_traceback(None))
    return size, bad
