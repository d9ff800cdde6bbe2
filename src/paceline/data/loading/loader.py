"""``paceline.data.Loader``: a DataLoader whose worker threads decode into reused buffers.

No batch is copied between processes.
"""

import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ...record.ring.recorder import update_all_headers
from ..format.shard_format import DataError
from ..sampling.samplers import BLOCK_BYTES, BlockShuffled, Ordered, Shuffled
from ..shards import Shards
from .array_dataset import ArrayDataset
from .batch import PendingBatch, SamplePipeline
from .concat_dataset import ConcatDataset
from .external_transforms import adapt_transform
from .file_dataset import Files
from .mixup import MixUp
from .read_ahead import ReadAhead, read_ahead_samples
from .stored_arrays import StoredArrays, is_stored_array
from .workers import InlineWorker, ProcessWorkers, ThreadWorkers

Pull = Callable[[], tuple[int, Any] | None]  # a batch: number of samples, tensors

# Totals over all loaders of this process, written to the record for the report.
_totals: dict[str, Any] = {
    "workers": 0,
    "processes": False,
    "busy_s": 0.0,
    "seconds": 0.0,
    "left_out": 0,
}


class Loader(DataLoader[Any]):
    """DataLoader for packed datasets, arrays, and files. Yields [x, y], or x without labels.

    Images have the shape (batch, channels, height, width) in channels-last memory format, and the
    dtype uint8 unless a transform changes it. If a transform returns tensors, their layout is kept.
    The memory of a batch is reused when no references to the batch are left.

    Args:
        source: A packed dataset (its folder, or ``Shards``), arrays (x or (x, y)), arrays in HDF5,
            netCDF or zarr ("FILE:ARRAY" or ("FILE:ARRAY", "LABELS")), a folder of files that are
            not packed (``Files``), or a list of such sources.
        batch_size: Samples per batch; with ``world.shard``, per rank.
        shuffle: True, or "blocks" for storage that is slow at small reads. The order depends only
            on (seed, epoch).
        sampler: Any torch sampler, instead of ``shuffle``.
        num_workers: Number of worker threads. Default: 2, or 1 if the rank has one core. With 0,
            batches are loaded in the calling thread when they are requested.
        prefetch_factor: Number of batches that are prefetched.
        transform: Transform of the array of a sample: ``f(x)``, or ``f(x, rng)`` with a NumPy
            Generator whose state depends only on (seed, epoch, sample), or an albumentations
            transform, which is seeded in the same way. Images have the shape
            (height, width, channels), for the input and the output.
        mix_up: Parameter of mix-up (Zhang et al., arXiv 1710.09412): each sample is mixed with
            another sample of the dataset, with weights from Beta(mix_up, mix_up) that depend only
            on (seed, epoch, sample). Labels are then float32; class labels become the weight of
            each class. Two samples are decoded for each sample of a batch.
        collate_fn: Function that makes a batch of a list of samples, for samples that can't be
            stacked.
        drop_last: Whether to drop the last batch if it is smaller than ``batch_size``.
        pin_memory: Whether batches are in pinned memory. Not supported with ``processes``.
        processes: Whether the workers are processes, for transforms that hold the GIL. In worker
            processes, the global random generators are seeded for each sample, too.
        seed: Seed of the order and of the transforms.
        on_error: "stop", or "skip" to leave out samples that can't be read, with a warning. The
            errors are listed in ``skipped``.
        dali: Function that defines a graph of NVIDIA DALI operators, ``f(samples)`` or
            ``f(samples, rng)``. ``samples`` is a DataNode of undecoded samples (bytes of files as
            uint8, or arrays). ``rng.uniform(low, high)`` and ``rng.coin(share)`` return DataNodes
            that depend only on (seed, epoch, sample). The function returns one or several
            DataNodes, from which DALI makes the batches, on the GPU of this process if there is
            one.

    Raises:
        ValueError: The source is not supported or arguments contradict each other; during
            iteration, samples of a batch differ in shape.
        DataError: During iteration, a sample can't be read.
    """

    def __init__(
        self,
        source: Any,
        batch_size: int = 1,
        shuffle: bool | str = False,
        *,
        sampler: Any = None,
        num_workers: int | None = None,
        prefetch_factor: int = 2,
        transform: Callable[..., Any] | None = None,
        mix_up: float | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        processes: bool = False,
        seed: int = 0,
        on_error: str = "stop",
        dali: Callable[..., Any] | None = None,
    ) -> None:
        if on_error not in ("stop", "skip"):
            raise ValueError(f"Loader: on_error={on_error!r}. HINT: 'stop' or 'skip'")
        dataset = _dataset(source)
        if not len(dataset):
            raise ValueError(f"Loader: {dataset!r} has no samples")
        if sampler is not None and shuffle:
            raise ValueError("Loader: sampler and shuffle are two orders. HINT: one of them")
        if processes and pin_memory:
            raise ValueError(
                "Loader: processes have no pinned memory. HINT: processes=False, or "
                "pin_memory=False"
            )
        if dali is not None:
            others = {"transform": transform, "mix_up": mix_up, "collate_fn": collate_fn}
            _check_dali_arguments(
                {**others, "pin_memory": pin_memory or None, "processes": processes or None}
            )
        if num_workers is None:
            num_workers = min(2, len(os.sched_getaffinity(0)))
        super().__init__(
            dataset,
            batch_size,
            sampler=_order(dataset, shuffle, seed) if sampler is None else sampler,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor if num_workers else None,
            pin_memory=pin_memory,
            drop_last=drop_last,
        )
        skips, self._processes = on_error == "skip", processes
        mixing = None if mix_up is None else MixUp(dataset, mix_up)
        self._pipeline = SamplePipeline(
            dataset, adapt_transform(transform), collate_fn, seed, skips, processes, mixing
        )
        self._dali, self._max_batch_size = dali, batch_size
        self._graph: tuple[tuple[int, int], Any] | None = None
        if dali is not None:
            from .dali import Undecoded

            self._pipeline = Undecoded(dataset, seed, skips)
        self._epoch, self._start = 0, 0
        self._given = 0  # samples of the current epoch that were returned
        self._ranks, self._skipped_before = 1, 0
        self._pool: tuple[int, ThreadWorkers | ProcessWorkers] | None = None

    @property
    def skipped(self) -> list[DataError]:
        """Errors of the samples left out so far (on_error="skip")."""
        return self._pipeline.skipped

    def check_worker_number_rationality(self) -> None:
        """Override DataLoader's warning about too many worker processes, as workers are threads."""

    def over(self, batches: Any, seed: int, ranks: int) -> "Loader":
        """Return a copy that loads the batches of one rank, for ``world.shard``.

        batches: batch sampler that yields lists of (epoch, sample).
        """
        other = Loader.__new__(Loader)
        changed: dict[str, Any] = {"batch_sampler": batches, "_recipe": self._pipeline.seeded(seed)}
        changed["_ranks"] = ranks
        changed["_max_batch_size"], changed["_graph"] = -(-batches.split.batch // ranks), None
        # DataLoader draws its base seed from this generator, not from that of the training.
        changed["generator"] = torch.Generator().manual_seed(seed)
        other.__dict__.update({**self.__dict__, **changed, "_pool": None, "_iterator": None})
        return other

    # Position

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; without a call, epochs count up from 0."""
        self._epoch, self._start = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of samples loaded in it.

        ``world`` saves this position automatically.
        """
        return {"epoch": self._epoch, "sample": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from this position in the next pass; the batch size may differ."""
        self._epoch, self._start = state["epoch"], state["sample"]

    # Passes

    def _get_iterator(self) -> "_Pass":
        return _Pass(self)

    def begin_pass(self) -> int:
        """Begin a pass and return the position of its first sample."""
        if isinstance(self.sampler, Ordered):
            self.sampler.set_epoch(self._epoch)
        self._workers()  # worker processes must be forked by the training thread
        start, self._start = self._start, 0
        self._given, self._pipeline.busy_s = start, 0.0
        return start

    def count_samples(self, samples: int) -> None:
        """Count the samples of one more batch of the pass."""
        self._given += samples

    def end_pass(self, seconds: float) -> None:
        """End the pass, which took ``seconds``, and update the totals in the record."""
        self._epoch, self._given = self._epoch + 1, 0
        busy, self._pipeline.busy_s = self._pipeline.busy_s, 0.0
        _totals["seconds"] += seconds
        _totals["busy_s"] += busy if self.num_workers else 0.0
        _totals["workers"] = max(_totals["workers"], self.num_workers)
        _totals["processes"] = _totals["processes"] or self._processes
        _totals["left_out"] += len(self.skipped) - self._skipped_before
        self._skipped_before = len(self.skipped)
        update_all_headers(loader=dict(_totals))

    def batch(self, keys: list[Any]) -> PendingBatch:
        """Start to load a batch.

        Args:
            keys: List of (epoch, sample), or of samples of the current epoch.
        """
        if not isinstance(keys[0], tuple):
            keys = [(self._epoch, int(i)) for i in keys]
        workers = self._workers()
        pinned = self.pin_memory and not self._processes and torch.cuda.is_available()
        return PendingBatch(self._pipeline, keys, workers.submit, self.num_workers, pinned)

    def wrap_with_dali(self, pull: Pull) -> Pull:
        """Return the source of batches: a DALI graph with ``pull`` as input, or ``pull``."""
        if self._dali is None:
            return pull
        from .dali import Graph, Undecoded

        how = max(self.num_workers, 1), max(self.prefetch_factor or 1, 1)
        if self._graph is None or self._graph[0] != how or not self._graph[1].begin_pass(pull):
            assert isinstance(self._pipeline, Undecoded)
            self._graph = how, Graph(self._dali, self._pipeline, self._max_batch_size, *how)
            self._graph[1].begin_pass(pull)
        graph: Graph = self._graph[1]
        return graph.next

    def read_ahead(self, batches: Any) -> ReadAhead:
        """Return the same batches, with blocks prefetched before they are needed."""
        count = read_ahead_samples(self._pipeline.source) // self._ranks
        return ReadAhead(self._pipeline.source, batches, count, self._workers().call)

    def _workers(self) -> InlineWorker | ThreadWorkers | ProcessWorkers:
        if not self.num_workers:
            return InlineWorker()
        if self._pool is None or self._pool[0] != self.num_workers:
            if self._pool is not None:
                self._pool[1].close()
            count = self.num_workers
            workers = (
                ProcessWorkers(self._pipeline, count) if self._processes else ThreadWorkers(count)
            )
            self._pool = (count, workers)
            weakref.finalize(self, workers.close)
        return self._pool[1]


class _Pass(_BaseDataLoaderIter):
    """Iterator over one pass; a subclass of torch's iterator, so that hooks on DataLoader apply."""

    def __init__(self, loader: Loader) -> None:
        start = loader.begin_pass()
        super().__init__(loader)
        self._begin(loader, start)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        start = loader.begin_pass()
        super()._reset(loader, first_iter)
        self._begin(loader, start)

    def _begin(self, loader: Loader, start: int) -> None:
        self._loader, self._ahead, self._began = loader, deque[PendingBatch](), time.monotonic()
        if start:
            rest = list(islice(iter(loader.sampler), start, None))
            self._sampler_iter = iter(BatchSampler(rest, loader.batch_size or 1, loader.drop_last))
        if isinstance(loader.sampler, BlockShuffled) and isinstance(loader.dataset, Shards):
            self._sampler_iter = loader.read_ahead(self._sampler_iter)
        self._next_batch = loader.wrap_with_dali(self._made)

    def _next_data(self) -> Any:
        found = self._next_batch()
        if found is None:
            self._loader.end_pass(time.monotonic() - self._began)
            raise StopIteration
        samples, whole = found
        self._loader.count_samples(samples)
        return whole

    def _made(self) -> tuple[int, Any] | None:
        """Return (number of samples, batch), or None at the end of the pass."""
        loader = self._loader
        depth = max(loader.prefetch_factor or 1, 1)
        while len(self._ahead) < depth and (keys := next(self._sampler_iter, None)) is not None:
            self._ahead.append(loader.batch(keys))
        if not self._ahead:
            return None
        batch = self._ahead.popleft()
        return len(batch.keys), batch.wait(loader)


def _dataset(source: Any) -> Any:
    if is_stored_array(source):
        return StoredArrays(source)
    if isinstance(source, (str, os.PathLike)):
        return Shards(source)
    if isinstance(source, tuple) and len(source) == 2 and is_stored_array(source[0]):
        return StoredArrays(*source)
    if isinstance(source, (Shards, ArrayDataset, ConcatDataset, StoredArrays, Files)):
        return source
    if isinstance(source, list) and source:
        return ConcatDataset([_dataset(one) for one in source])
    if isinstance(source, TensorDataset):
        source = source.tensors
    if isinstance(source, tuple) and len(source) in (1, 2):
        return ArrayDataset(*source)
    if isinstance(source, (np.ndarray, torch.Tensor)):
        return ArrayDataset(source)
    raise ValueError(
        f"Loader: {type(source).__name__} is no source. HINT: a folder that paceline pack has "
        "written, HDF5, netCDF or zarr, arrays x or (x, y); for other datasets torch's DataLoader"
    )


def _check_dali_arguments(others: dict[str, Any]) -> None:
    """Raise ValueError for arguments that can't be combined with ``dali``."""
    named = [name for name, value in others.items() if value is not None]
    if named:
        raise ValueError(
            f"Loader: dali and {', '.join(named)}. HINT: without {', '.join(named)}; what it does "
            "belongs into the function that dali is"
        )


def _order(dataset: Any, shuffle: bool | str, seed: int) -> Ordered:
    if shuffle not in (True, False, "blocks"):
        raise ValueError(f"Loader: shuffle={shuffle!r}. HINT: True, False or 'blocks'")
    if shuffle == "blocks" and isinstance(dataset, Shards):
        each = max(dataset.meta.bytes / len(dataset), 1)
        return BlockShuffled(len(dataset), int(BLOCK_BYTES / each), seed)
    if shuffle == "blocks" and isinstance(dataset, StoredArrays):
        return dataset.in_blocks(seed)
    if shuffle and isinstance(dataset, StoredArrays):
        dataset.fights()
    return (Shuffled if shuffle else Ordered)(len(dataset), seed)
