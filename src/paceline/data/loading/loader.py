"""``paceline.data.Loader``: a DataLoader whose worker threads decode into reused buffers.

No batch is copied between processes.
"""

import os
import sys
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ...record.ring.recorder import update_all_headers
from ..format.shard_format import DataError
from ..sampling.passes import Key, Pass, Passes
from ..sampling.sample_order import derive_seed
from ..sampling.samplers import BLOCK_BYTES, WINDOW, BlockShuffled
from ..sampling.shard_loader import SampleDivision
from ..shards import Shards
from .batch import PendingBatch, SamplePipeline
from .external_transforms import adapt_transform
from .mixup import MixUp
from .open_dataset import PartDataset, make_sampler, open_dataset
from .workers import InlineWorker, ProcessWorkers, ThreadWorkers

Workers = ThreadWorkers | ProcessWorkers
# Kept in a forked child: freeing one would wait for threads that exist in the parent only.
_graphs_of_parents: list[Any] = []
Pull = Callable[[], tuple[int, Any] | None]  # a batch: number of samples, tensors
# Totals over all loaders of this process, written to the record for the report.
_totals: dict[str, Any] = {
    "workers": 0,
    "processes": False,
    "busy_s": 0.0,
    "seconds": 0.0,
    "left_out": 0,
}


# Prefetch for ``shuffle="blocks"``: large blocks are read before their samples are requested.
#
# With it, loading reaches the sequential bandwidth of the storage, although single samples are
# requested.

Keys = list[Any]


class ReadAhead:
    """Iterator over batches of keys that prefetches the blocks of later batches.

    Args:
        shards: The dataset.
        batches: Iterator over lists of keys, one list per batch.
        samples: Number of samples to prefetch ahead of the current batch.
        submit: Function that runs a function in a worker.
    """

    def __init__(
        self, shards: Shards, batches: Iterator[Keys], samples: int, submit: Callable[..., Any]
    ) -> None:
        self._shards, self._batches, self._samples, self._submit = shards, batches, samples, submit
        self._coming: deque[Keys] = deque()
        self._count = 0
        self._asked: OrderedDict[tuple[int, int], None] = OrderedDict()

    def __iter__(self) -> "ReadAhead":
        return self

    def __next__(self) -> Keys:
        while self._count <= self._samples and (keys := next(self._batches, None)) is not None:
            self._coming.append(keys)
            self._count += len(keys)
            self._submit(self._ask, keys)
        if not self._coming:
            raise StopIteration
        first = self._coming.popleft()
        self._count -= len(first)
        return first

    def _ask(self, keys: Keys) -> None:
        """Ask the kernel to read the blocks of these samples in the background.

        Blocks that are in the page cache already are not read again.
        """
        for key in keys:
            row = self._shards.row(key[1] if isinstance(key, tuple) else int(key))
            block = row.offset // BLOCK_BYTES
            for place in {
                (row.shard, block),
                (row.shard, (row.offset + row.length) // BLOCK_BYTES),
            }:
                if place not in self._asked:
                    self._asked[place] = None
                    if len(self._asked) > 4 * WINDOW:
                        self._asked.popitem(last=False)
                    self._shards.prefetch_block(*place, BLOCK_BYTES)


def read_ahead_samples(shards: Shards) -> int:
    """Return the number of samples to prefetch: half of a window.

    The next window is then requested while half of the current one is still unused.
    """
    each = max(shards.meta.bytes / len(shards), 1)
    return max(int(WINDOW * BLOCK_BYTES / each / 2), 1)


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
        sampler: Any torch sampler, instead of ``shuffle``. ``set_epoch`` of the sampler also sets
            the epoch of the transforms.
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
            errors are listed in ``skipped``. Under ``world.shard``, a rank that has no readable
            sample for a global batch repeats another batch with weight zero.
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
            raise ValueError(
                f"Loader: on_error must be 'stop' or 'skip'; this is {on_error!r}. HINT: "
                "on_error='skip'"
            )
        dataset = open_dataset(source)
        if not len(dataset):
            raise ValueError(f"Loader: {dataset!r} has no samples")
        if sampler is not None and shuffle:
            raise ValueError("Loader: sampler and shuffle both define the order. HINT: pass one")
        if processes and pin_memory:
            raise ValueError(
                "Loader: pin_memory=True is not supported with processes=True. HINT: "
                "processes=False, or pin_memory=False"
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
            sampler=make_sampler(dataset, shuffle, seed) if sampler is None else sampler,
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
        self._passes = Passes(self.sampler)
        self._rank_batches: Any = None  # batches of this rank, under world.shard
        self._skipped_before = 0
        self._workers: tuple[int, Workers, weakref.finalize[..., Any]] | None = None

    # The workers belong to the loader, not to a pass: they persist in any case.
    @property
    def persistent_workers(self) -> bool:
        """Always false: iterators are not reused, and each one has its own pass."""
        return False

    @persistent_workers.setter
    def persistent_workers(self, value: bool) -> None: ...

    @property
    def skipped(self) -> list[DataError]:
        """Errors of the samples that were left out (on_error="skip")."""
        return self._pipeline.skipped

    @property
    def may_skip(self) -> bool:
        """Whether samples that can't be read are left out."""
        return self._pipeline.skips

    def check_worker_number_rationality(self) -> None:
        """Override DataLoader's warning about too many worker processes, as workers are threads."""

    def over(self, batches: Any, seed: int, division: SampleDivision | None = None) -> "Loader":
        """Return a copy that loads the batches of one rank, for ``world.shard``.

        The copy returns None for a batch whose samples are all left out.

        Args:
            batches: Batch sampler that yields lists of (epoch, sample).
            seed: Seed of the world.
            division: The part of a sample that this rank computes with. Samples that are
                transformed, mixed or collated, images, and samples that may be left out, are
                loaded whole.

        Raises:
            ValueError: This loader is to continue a pass, in which the ranks have another order.
        """
        position = self.state_dict()
        if self._passes.is_resuming:
            raise ValueError(
                "world.shard: the Loader is to continue at the position of load_state_dict (epoch "
                f"{position['epoch']}, sample {position['sample']}), but ranks have another order. "
                "HINT: world.epochs(..., checkpoint=...) saves and restores the position of "
                "sharded loaders"
            )
        pipeline = self._pipeline.seeded(derive_seed(seed, self._pipeline.seed))
        is_plain = pipeline.plain and pipeline.collate is None and self._dali is None
        source: Any = self.dataset
        if division is not None and is_plain and not pipeline.skips and not source.images:
            part = PartDataset(source, division)
            pipeline.source = part if part.is_divided else source
        other = Loader.__new__(Loader)
        other.__dict__.update(
            self.__dict__,
            batch_sampler=batches,
            # DataLoader draws its base seed from this generator, not from that of the training.
            generator=torch.Generator().manual_seed(seed),
            _pipeline=pipeline,
            _passes=Passes(self.sampler),
            _rank_batches=batches,
            _max_batch_size=batches.largest,
            _graph=None,
            _workers=None,
        )
        return other

    @property
    def divided_shapes(self) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None] | None:
        """Shapes of whole samples and labels of which parts are loaded; None if none are."""
        source = self._pipeline.source
        return source.shapes if isinstance(source, PartDataset) else None

    # Position

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, also for the sampler.

        Without a call, epochs count up from 0 with each pass, also if passes are abandoned. A call
        after ``load_state_dict`` keeps the position if it is in the same epoch.
        """
        self._passes.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch of the pass that began last, and the number of samples loaded in it.

        After the end of a pass: the next epoch, and 0. ``order_seed`` is added for a sampler that
        draws its order from random generators. ``world`` saves the position automatically.
        """
        return self._passes.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from this position in the next pass; the batch size may differ."""
        self._passes.load_state_dict(state)

    # Passes

    def _get_iterator(self) -> "_LoaderIterator":
        return _LoaderIterator(self)

    def begin_pass(self, seed: int) -> Pass:
        """Begin a pass. seed: of the order, if the sampler draws it from random generators."""
        self.running_workers()  # worker processes must be forked by the training thread
        self._pipeline.trim_buffers(max(self.prefetch_factor or 1, 1))
        if self._rank_batches is None:
            begun = self._passes.begin(self.batch_size or 1, self.drop_last, seed)
        else:
            begun = Pass(self._rank_batches.epoch, iter(self._rank_batches))
        if isinstance(self.sampler, BlockShuffled) and isinstance(self.dataset, Shards):
            begun.batches = self._read_ahead(self.dataset, begun.batches)
        return begun

    def end_pass(self, ended: Pass) -> None:
        """Add a completed or abandoned pass to the totals in the record."""
        _totals["seconds"] += ended.seconds
        _totals["busy_s"] += ended.busy_s if self.num_workers else 0.0
        _totals["workers"] = max(_totals["workers"], self.num_workers)
        _totals["processes"] = _totals["processes"] or self._processes
        _totals["left_out"] += len(self.skipped) - self._skipped_before
        self._skipped_before = len(self.skipped)
        update_all_headers(loader=dict(_totals))

    def start_batch(self, keys: list[Key]) -> PendingBatch:
        """Start to load a batch of samples, (epoch, sample)."""
        submit = self.running_workers().submit
        pinned = self.pin_memory and not self._processes and torch.cuda.is_available()
        return PendingBatch(self._pipeline, keys, submit, self.num_workers, pinned)

    @property
    def is_rank_part(self) -> bool:
        """Whether the loader loads the batches of one rank, under ``world.shard``."""
        return self._rank_batches is not None

    def check_empty_batch(self) -> None:
        """Raise the error of the sample that was skipped last, if DALI makes the batches."""
        if self._dali is not None:
            raise self.skipped[-1]

    def dali_graph(self, pull: Pull) -> Any:
        """Return the DALI graph that makes the batches, with ``pull`` as input; None without."""
        if self._dali is None:
            return None
        from .dali import Graph, Undecoded

        how = max(self.num_workers, 1), max(self.prefetch_factor or 1, 1)
        if self._graph is not None and self._graph[1].process != os.getpid():
            _graphs_of_parents.append(self._graph[1])
            self._graph = None
        if self._graph is None or self._graph[0] != how or not self._graph[1].begin_pass(pull):
            assert isinstance(self._pipeline, Undecoded)
            self._graph = how, Graph(self._dali, self._pipeline, self._max_batch_size, *how)
            self._graph[1].begin_pass(pull)
        return self._graph[1]

    def _read_ahead(self, shards: Shards, batches: Any) -> ReadAhead:
        """Return the same batches, with blocks prefetched before they are needed."""
        ranks = 1 if self._rank_batches is None else self._rank_batches.split.ranks
        count = read_ahead_samples(shards) // ranks
        return ReadAhead(shards, batches, count, lambda *task: self.running_workers().call(*task))

    def running_workers(self) -> InlineWorker | Workers:
        """Return the workers, started if they don't run in this process with ``num_workers``."""
        if not self.num_workers:
            return InlineWorker()
        if self._workers is not None:
            count, workers, close = self._workers
            if count == self.num_workers and workers.process == os.getpid():
                return workers
            close()
            if workers.process != os.getpid():
                self._pipeline.leave_to_parent()
        count = self.num_workers
        workers = ProcessWorkers(self._pipeline, count) if self._processes else ThreadWorkers(count)
        self._workers = count, workers, weakref.finalize(self, workers.close)
        return workers


class _LoaderIterator(_BaseDataLoaderIter):
    """Iterator over one pass; a subclass of torch's iterator, so that hooks on DataLoader apply."""

    _pass: Pass | None = None  # None after the pass was added to the totals

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        self._loader, self._process, self._began = loader, os.getpid(), time.monotonic()
        self._ahead = deque[PendingBatch]()
        self._skipped_before = len(loader.skipped)
        self._pass = loader.begin_pass(int(self._base_seed))
        self._graph = loader.dali_graph(self._made)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._end()

    def _next_data(self) -> Any:
        if self._pass is None:
            raise StopIteration
        # The method is not stored, as a reference cycle would keep batches and workers.
        found = self._made() if self._graph is None else self._graph.next(self._made)
        self._pass.seconds = time.monotonic() - self._began
        if found is None:
            self._pass.completed = True
            skipped = self._loader.skipped[self._skipped_before :]
            nothing = not self._pass.returned and not self._loader.is_rank_part
            self._end()
            if nothing and skipped:
                raise skipped[0]
            raise StopIteration
        samples, batch = found
        self._pass.position += samples
        self._pass.returned += 1
        return batch

    def _end(self) -> None:
        ended, self._pass = self._pass, None
        if ended is not None:
            self._ahead.clear()
            self._loader.end_pass(ended)

    def _made(self) -> tuple[int, Any] | None:
        """Return (number of samples, batch), or None at the end of the pass.

        Batches whose samples are all left out are counted with the next one.
        """
        loader, this, samples = self._loader, self._pass, 0
        assert this is not None
        if self._process != os.getpid():  # the workers of the parent don't run in a forked child
            self._process = os.getpid()
            self._ahead = deque(loader.start_batch(pending.keys) for pending in self._ahead)
        depth = max(loader.prefetch_factor or 1, 1)
        while True:
            while len(self._ahead) < depth and (keys := next(this.batches, None)) is not None:
                self._ahead.append(loader.start_batch(keys))
            if not self._ahead:
                return None
            pending = self._ahead.popleft()
            batch = pending.wait(loader)
            samples += len(pending.keys)
            this.busy_s += pending.busy_s
            if batch is not None:
                return samples, batch
            if loader.is_rank_part:
                loader.check_empty_batch()
                return samples, None


def _check_dali_arguments(others: dict[str, Any]) -> None:
    """Raise ValueError for arguments that can't be combined with ``dali``."""
    named = [name for name, value in others.items() if value is not None]
    if named:
        raise ValueError(
            f"Loader: dali can't be combined with {', '.join(named)}. HINT: leave out "
            f"{', '.join(named)}, and do the same in the dali function"
        )
