"""``world.shard``: a rank's part of a ``DataLoader``, resumable at any position."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from ...plurals import counted
from .loader_options import RankLoader, loader_options
from .passes import Key, check_order_repeats, draw_order
from .sample_order import (
    BatchShare,
    BatchSplit,
    checksum,
    cpu_random_states,
    derive_seed,
    preserve_random_states,
    seed_cpu_generators,
    shuffled,
)
from .samplers import Ordered
from .sharded_stream import ShardedStream

# The batches of one rank, under ``world.shard``.


class RankBatches:
    """Batch sampler of one rank: yields lists of (epoch, sample), starting at a position.

    An iterator keeps the split, epoch, position and order that were set when it was made, so that
    several passes can be in progress.

    Attributes:
        largest: Samples of this rank's largest batch in any epoch.
    """

    def __init__(self, split: BatchSplit, rank: int, fill: bool, largest: int) -> None:
        self.split = split
        self.rank = rank
        self.fill = fill
        self.largest = largest
        self.epoch = 0
        self.start = 0
        self.order: torch.Tensor | None = None

    def begin(self, split: BatchSplit, epoch: int, start: int, order: torch.Tensor) -> None:
        """Set what the iterators made from now on yield."""
        self.split, self.epoch, self.start, self.order = split, epoch, start, order

    def __len__(self) -> int:
        return len(self.split) - self.start

    def __iter__(self) -> Iterator[list[Key]]:
        assert self.order is not None
        return self._batches(self.split, self.epoch, self.start, self.order)

    def _batches(
        self, split: BatchSplit, epoch: int, start: int, order: torch.Tensor
    ) -> Iterator[list[Key]]:
        for position in range(start, len(split)):
            first, end = split.bounds(position, self.rank)
            if first == end:  # fewer samples than ranks: repeat one, or skip the batch
                if not self.fill:
                    continue
                first, end = split.start(position), split.start(position) + 1
            yield [(epoch, index) for index in order[first:end].tolist()]


class _SeededSamples(Dataset[Any]):
    """A dataset whose random generators are seeded by (seed, epoch, sample) for each sample.

    So augmentation gives the same result with any number of ranks and workers. A dataset that has
    ``__getitems__`` of its own reads a batch at once, unless it draws random numbers there.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        # A TensorDataset draws no random numbers and needs no seeding.
        self.draws = type(dataset) is not TensorDataset
        inner = dataset
        while isinstance(inner, Subset):  # it has __getitems__, and reads one by one
            inner = inner.dataset
        self._reads_batches = hasattr(inner, "__getitems__")
        self._batches_draw = False  # whether a whole batch drew random numbers

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        if not self.draws:
            return [self.dataset[index] for _, index in keys]
        with preserve_random_states():
            if self._reads_batches and not self._batches_draw:
                seed_cpu_generators(derive_seed(self.seed, *keys[0]))
                before = cpu_random_states()
                samples: list[Any] = self.dataset.__getitems__([index for _, index in keys])
                if cpu_random_states() == before:
                    return samples
                self._batches_draw = True
            return [self._sample(epoch, index) for epoch, index in keys]

    def _sample(self, epoch: int, index: int) -> Any:
        seed_cpu_generators(derive_seed(self.seed, epoch, index))
        return self.dataset[index]


@runtime_checkable
class SkippingLoader(Protocol):
    """A loader that may leave out samples, as ``paceline.data.Loader`` does.

    A batch whose samples are all left out is None.

    Attributes:
        may_skip: Whether it leaves out samples that cannot be read.
        skipped: Errors of the samples that were left out.
    """

    @property
    def may_skip(self) -> bool: ...
    @property
    def skipped(self) -> Sequence[Exception]: ...


class SampleDivision(Protocol):
    """How several ranks divide each sample, in a layout with axes d, h or w."""

    def cut(self, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
        """Return this rank's part of a sample; None if it has no positions to divide."""

    def checks(self, i: int) -> bool:
        """Return whether this rank compares the checksum of a sample: one of the ranks does."""

    def assemble(self, part: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return parts of samples as a tensor of the whole ones; shape: of a whole sample."""


class ShardedLoader(RankLoader):
    """One rank's part of a map-style ``DataLoader``.

    Attributes:
        split: Split of the epoch that ``begin_epoch`` has begun, at first epoch 0.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        agree: Callable[[int, str], None] | None = None,
        division: SampleDivision | None = None,
        **options: Any,
    ) -> None:
        self._sampler: Any = _checked_sampler(loader)
        super().__init__(loader, **options)
        self._agree, self._division = agree, division
        ranks = self.ranks
        samples = len(self._sampler)
        if samples < ranks and not self.every_sample_once:
            raise ValueError(
                f"world.shard: {self.name} has {counted(samples, 'sample')} for "
                f"{counted(ranks, 'rank')}, so some would have none. HINT: start at most "
                f"{counted(max(samples, 1), 'rank')}"
            )
        largest = self.schedule.largest
        if not samples or (samples < largest and loader.drop_last):
            raise ValueError(
                f"world.shard: {self.name} has {counted(samples, 'sample')}, fewer than one global "
                f"batch of {largest}, and drop_last=True drops them all. HINT: drop_last=False, or "
                "a smaller batch"
            )
        self.split = BatchSplit(samples, self.schedule.at(0), ranks, loader.drop_last)
        each = -(-largest // ranks)
        self._batches = RankBatches(self.split, self.rank, not self.every_sample_once, each)
        self.loader = _over(loader, self._batches, self.seed, division)

    @property
    def batch(self) -> int:
        """Global batch size of the epoch that has begun last."""
        return self.split.batch

    def __len__(self) -> int:
        """Return the number of global batches per epoch, those that every rank steps with.

        With a batch schedule it is that of the present epoch, at first of epoch 0.
        """
        return len(self.split)

    def count_batches(self, epochs: int) -> int:
        """Return the number of global batches of epochs 0 to ``epochs - 1`` together."""
        sizes = map(self.schedule.at, range(epochs))
        return sum(len(replace(self.split, batch=size, first=0)) for size in sizes)

    def begin_epoch(self, epoch: int, first: int = 0) -> None:
        """Set the batch size to that of an epoch; ``first``: samples that are left out."""
        self.split = replace(self.split, batch=self.schedule.at(epoch), first=first)

    def iterate(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, BatchShare]]:
        """Yield (batch, share) of this rank, from position ``start`` of ``epoch``.

        Raises:
            ValueError: ``start`` is above 0, and the sampler does not repeat its order.
        """
        split, resumes = self.split, start > 0 or self.split.first > 0
        self._batches.begin(split, epoch, start, self._order(epoch, resumes))
        shares = (split.share(p, self.rank) for p in range(start, len(split)))
        if not self._batches.fill:
            shares = (share for share in shares if not share.filler)
        pairs = self._assembled(self.paired(shares))
        loader: object = self.loader
        if isinstance(loader, SkippingLoader) and loader.may_skip:
            yield from self._fill_empty(pairs, loader.skipped)
        else:
            yield from pairs

    def paired(self, shares: Iterator[BatchShare]) -> Iterator[tuple[Any, BatchShare]]:
        """Pair each batch with its share. ``paceline verify`` replaces this in one process that
        trains the batches of several ranks one after the other.
        """
        return zip(self.loader, shares, strict=True)

    def _assembled(
        self, pairs: Iterator[tuple[Any, BatchShare]]
    ) -> Iterator[tuple[Any, BatchShare]]:
        """Make tensors of whole samples of the parts that the loader yields."""
        shapes = getattr(self.loader, "divided_shapes", None)
        division = self._division
        if division is None or shapes is None:
            return pairs

        def assemble(batch: Any) -> Any:
            tensors = batch if isinstance(batch, list) else [batch]
            whole = [
                tensor if shape is None else division.assemble(tensor, shape)
                for tensor, shape in zip(tensors, shapes, strict=False)
            ]
            return whole if isinstance(batch, list) else whole[0]

        return ((assemble(batch), share) for batch, share in pairs)

    def _fill_empty(
        self, pairs: Iterator[tuple[Any, BatchShare]], skipped: Sequence[Exception]
    ) -> Iterator[tuple[Any, BatchShare]]:
        """Replace each None, a batch whose samples are all left out, by a filler.

        The filler is another batch of this rank with weight zero, so that the rank takes part in
        the collectives. If every sample is to be seen once, the batch is left out instead.

        Raises:
            DataError: No batch of the rank has a readable sample.
        """
        before = len(skipped)
        last, waiting = None, list[BatchShare]()
        for batch, share in pairs:
            if batch is not None:
                yield from ((batch, replace(empty, filler=True)) for empty in waiting)
                waiting, last = [], batch
                yield batch, share
            elif self._batches.fill and last is None:
                waiting.append(share)
            elif self._batches.fill:
                yield last, replace(share, filler=True)
        if waiting:
            raise skipped[before]

    def give_equal_batches(self) -> None:
        """Give all ranks the same number of batches also in validation, by fillers at the end."""
        self._batches.fill = True

    def group_total(self, share: BatchShare, accumulate: int) -> int:
        return self.split.group_total(share.position, accumulate)

    def _order(self, epoch: int, resumes: bool = False) -> torch.Tensor:
        if isinstance(self._sampler, SequentialSampler):
            return torch.arange(self.split.samples)
        if isinstance(self._sampler, Ordered):
            return self._sampler.order(derive_seed(self.seed, self._sampler.seed), epoch)
        if _is_plain_shuffle(self._sampler):
            return shuffled(self.split.samples, self.seed, epoch)
        # Other samplers draw from generators that have the same seed on every rank.
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        seed = derive_seed(self.seed, epoch)
        order = draw_order(self._sampler, seed)
        if resumes:
            check_order_repeats(
                self._sampler, order, seed, f"world.batches: {self.name}: the sampler"
            )
        if self._agree is not None:
            self._agree(
                checksum(order),
                f"the sampler {type(self._sampler).__name__} of {self.name} gives ranks different "
                "orders. HINT: draw from torch's, numpy's or random's global generator, or "
                "from a `generator` attribute",
            )
        return order


def _over(
    loader: DataLoader[Any], batches: RankBatches, seed: int, division: SampleDivision | None
) -> DataLoader[Any]:
    """Return a copy of the user's loader with these batches and with seeded samples."""
    # data.Loader has this method. Its class is not imported, to keep every start fast.
    if hasattr(loader, "over"):
        rank_loader: DataLoader[Any] = loader.over(batches, seed, division)
        return rank_loader
    return DataLoader(
        _SeededSamples(loader.dataset, seed),
        batch_sampler=batches,
        # DataLoader draws the workers' base seed from this generator, not the training's.
        generator=torch.Generator().manual_seed(seed),
        **loader_options(loader),
    )


def _is_plain_shuffle(sampler: Any) -> bool:
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )


def _checked_sampler(loader: DataLoader[Any]) -> Any:
    if type(loader.batch_sampler) is not BatchSampler:
        kind = type(loader.batch_sampler).__name__
        raise ValueError(
            f"world.shard: the DataLoader's batch_sampler ({kind}) chooses the batches, so "
            "Paceline can't split them into equal parts. HINT: use batch_size and sampler"
        )
    if isinstance(loader.sampler, DistributedSampler):
        raise ValueError(
            "world.shard: the DataLoader has a DistributedSampler, which splits the samples "
            "already. HINT: pass the DataLoader of a training on one device (shuffle=True)"
        )
    return loader.sampler


def shard(loader: Any, *, split: str | None = None, **options: Any) -> Any:
    """Return a ShardedLoader or ShardedStream for a DataLoader; see ``World.shard``."""
    if not isinstance(loader, DataLoader):
        kind = type(loader).__name__
        raise ValueError(
            f"world.shard takes a torch DataLoader, not {kind}. HINT: DataLoader(dataset, "
            "batch_size=...)"
        )
    agree, count_all = options.pop("agree"), options.pop("count_all")
    division = options.pop("division", None)
    if isinstance(loader.dataset, IterableDataset):
        return ShardedStream(loader, split=split, count_all=count_all, **options)
    return ShardedLoader(loader, agree=agree, division=division, **options)
