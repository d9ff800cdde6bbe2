"""``world.shard`` of an ``IterableDataset``: a rank's part of a stream."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ...plurals import counted, ordinal
from ...record.hooks.batch_size import samples_in
from .loader_options import RankLoader, loader_options
from .sample_order import BatchShare


class ShardedStream(RankLoader):
    """One rank's part of an ``IterableDataset``, whose length is not known in advance.

    ``count_all(n)`` returns the number of samples that all ranks together have for the next step.
    A rank without further samples repeats its last batch with weight zero until all ranks have
    reached the end.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        count_all: Callable[[int], int],
        split: str | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(loader, **arguments)
        self._count_all = count_all
        self._counts_ranks = not self.every_sample_once
        self.batch = self.schedule.at(0)
        options = loader_options(loader)
        if hasattr(loader.dataset, "set_epoch"):
            # Workers that persist have a copy of the dataset, which set_epoch does not reach.
            options.pop("persistent_workers", None)
        self.loader: DataLoader[Any] = DataLoader(
            _own_part(loader.dataset, self.rank, self.ranks, split, self.name),
            batch_size=self._rank_batch(),
            drop_last=loader.drop_last,
            generator=torch.Generator().manual_seed(self.seed),
            **options,
        )

    def _rank_batch(self) -> int:
        each, more = divmod(self.batch, self.ranks)
        return each + (self.rank < more)

    def begin_epoch(self, epoch: int) -> None:
        """Set the batch size to that of an epoch."""
        if self.schedule.at(epoch) == self.batch:
            return
        self.batch = self.schedule.at(epoch)
        sampler: Any = self.loader.batch_sampler
        sampler.batch_size = self._rank_batch()
        # DataLoader.__setattr__ rejects it after construction
        self.loader.__dict__["batch_size"] = sampler.batch_size

    def iterate(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, BatchShare]]:
        set_epoch = getattr(self.loader.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        source = iter(self.loader)
        batch, position = None, 0
        ahead = self._next(source)
        while ahead[2]:
            # Read one batch ahead, to know whether this batch is the last one before its use.
            (fresh, count, total), ahead = ahead, self._next(source)
            if fresh is not None:
                batch = fresh
            elif batch is None:
                raise ValueError(
                    f"world.batches: this rank's part of {self.name} has no samples. "
                    "HINT: start fewer ranks, or use a dataset whose shard() gives each rank some"
                )
            if position >= start:
                yield batch, BatchShare(position, count, total, count == 0, not ahead[2])
            position += 1

    def _next(self, source: Iterator[Any]) -> tuple[Any, int, int]:
        batch = next(source, None)
        count = 0 if batch is None else samples_in(batch)
        return batch, count, self._count_all(count) if self._counts_ranks else count

    def give_equal_batches(self) -> None:
        """Give all ranks the same number of batches also in validation, by fillers at the end."""
        self._counts_ranks = True

    def group_total(self, share: BatchShare, accumulate: int) -> int | None:
        """Return the number of samples accumulated together with ``share``, None if unknown.

        With accumulation it is unknown, because later batches may be uneven.
        """
        return share.total if accumulate == 1 else None


class _EveryNth(IterableDataset[Any]):
    """Every ``ranks``-th sample of a stream that each rank reads completely (split="stride")."""

    def __init__(self, dataset: Any, rank: int, ranks: int) -> None:
        self.dataset, self.rank, self.ranks = dataset, rank, ranks

    def __iter__(self) -> Iterator[Any]:
        return (s for i, s in enumerate(self.dataset) if i % self.ranks == self.rank)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


def _own_part(dataset: Any, rank: int, ranks: int, split: str | None, name: str) -> Any:
    if ranks == 1:
        return dataset
    if split == "stride":
        return _EveryNth(dataset, rank, ranks)
    if split is not None:
        raise ValueError(f"world.shard: split={split!r} must be 'stride'. HINT: split='stride'")
    if not hasattr(dataset, "shard"):
        raise ValueError(
            f"world.shard: {name} is an IterableDataset without a shard(num_shards, index) "
            f"method, so each of {counted(ranks, 'rank')} would read all of it. HINT: add this "
            "method (return rank `index`'s part), or pass split='stride': each rank then reads the "
            f"whole stream and uses every {ordinal(ranks)} sample"
        )
    return dataset.shard(num_shards=ranks, index=rank)
