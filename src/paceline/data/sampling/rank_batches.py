"""The batches of one rank, under ``world.shard``."""

from collections.abc import Iterator

import torch

from .passes import Key
from .sample_order import BatchSplit


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
