"""CPU time per sample when the files are in the page cache."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...data.loading.batch import SamplePipeline, make_piece
from ...data.loading.external_transforms import adapt_transform
from ...data.loading.file_dataset import Files
from ...data.loading.stored_arrays import StoredArrays
from ...data.shards import ScratchBuffer, Shards
from ...data.sources.open_source import import_function
from ...predict.input_rate import Terms
from .load_rank import LoadRankConfig, collate_as_list
from .run_loaders import measure_run
from .sample_files import Place, order_of, together

# Maximum threads of the process that measures one loader on all cores, and maximum number of
# processes that measure the cost per sample while all cores are busy.
MAX_THREADS = 8
MANY = 10_000


def from_memory(feed: LoadRankConfig, data: Any, some: list[Place]) -> Terms:
    """Measure the CPU seconds per sample and its parts, and the rate of one process on all cores.

    The cost per sample is that of one core while the other cores are equally busy. It is measured
    in new processes with loaders as in training, so that state of this process has no effect.
    """
    mine = sorted(os.sched_getaffinity(0))
    alone = replace(feed, rank=0, ranks=1)
    samples_s = measure_run([replace(alone, threads=min(len(mine), MAX_THREADS))])
    each = [replace(alone, cores=(core,)) for core in mine[:MAX_THREADS]]
    core_s = len(each) / measure_run(each)
    read_s, plain_s, whole_s, first_s = _parts(feed, data)
    scale = core_s / whole_s
    return Terms(
        samples=len(data),
        bytes=sum(length for _, _, length in some) / len(some) / together(data),
        cores=len(mine),
        read_s=scale * read_s,
        decode_s=scale * (plain_s - read_s),
        transform_s=scale * (whole_s - plain_s),
        alone=samples_s,
        stored_s=scale * first_s,
        kind=_kind(data),
        chunk=together(data),
        decoded=data.array_spec.nbytes if isinstance(data, StoredArrays) else 0.0,
    )


def _kind(data: Any) -> str:
    kinds = {Files: "files", StoredArrays: "store", Shards: "packed"}
    return kinds[type(data)]


def _parts(feed: LoadRankConfig, data: Any) -> tuple[float, float, float, float]:
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
