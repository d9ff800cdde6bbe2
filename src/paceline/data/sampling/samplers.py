"""Orders of samples, each a pure function of (seed, epoch): samplers for a DataLoader, and for
``world.shard``, which cuts them for its ranks."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from .sample_order import derive_seed, shuffled

WINDOW = 64  # blocks whose samples are mixed
BLOCK_BYTES = 4 << 20


class Ordered(Sampler[int]):
    """All samples, in the order of ``order(seed, epoch)``."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        self.samples, self.seed, self.epoch = samples, seed, 0

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        return iter(self.order(self.seed, self.epoch).tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self, seed: int, epoch: int) -> torch.Tensor:
        """int64, the number of samples."""
        return torch.arange(self.samples)


class Shuffled(Ordered):
    """A permutation of all of them, another one in each epoch."""

    def order(self, seed: int, epoch: int) -> torch.Tensor:
        return shuffled(self.samples, seed, epoch)


class BlockShuffled(Ordered):
    """Shuffled for storage that reads large pieces fast and small ones slowly: blocks of
    neighbours in a random order, and the samples of each ``window`` of blocks mixed.

    block: samples of a block. A set that was packed in random order is as well mixed as by a
    permutation of all samples where the window is many batches.
    """

    def __init__(self, samples: int, block: int, seed: int = 0, window: int = WINDOW) -> None:
        super().__init__(samples, seed)
        self.block, self.window = max(block, 1), max(window, 1)

    def order(self, seed: int, epoch: int) -> torch.Tensor:
        blocks = -(-self.samples // self.block)
        chosen = shuffled(blocks, derive_seed(seed, 1), epoch)
        inside = torch.arange(self.block)
        generator = torch.Generator().manual_seed(derive_seed(seed, 2, epoch))
        parts = []
        for first in range(0, blocks, self.window):
            some = chosen[first : first + self.window, None] * self.block + inside
            mixed = some.reshape(-1)[torch.randperm(some.numel(), generator=generator)]
            parts.append(mixed[mixed < self.samples])  # the last block may be shorter
        return torch.cat(parts) if parts else inside[:0]


class Weighted(Ordered):
    """Samples drawn with replacement, each as often as its weight says.

    weights: one a sample, not negative. samples: of an epoch; as many as there are weights.
    Raises ValueError where no weight is above zero.
    """

    def __init__(self, weights: Any, samples: int | None = None, seed: int = 0) -> None:
        each = torch.as_tensor(weights, dtype=torch.float64)
        if each.ndim != 1 or not len(each) or each.min() < 0 or each.sum() <= 0:
            raise ValueError("Weighted: weights are one a sample, not negative, not all zero")
        super().__init__(samples or len(each), seed)
        self._sums = each.cumsum(0) / each.sum()

    @classmethod
    def balanced(cls, labels: Any, samples: int | None = None, seed: int = 0) -> "Weighted":
        """Each class as often as any other: ``Weighted.balanced(shards.labels())``."""
        classes = torch.as_tensor(labels)
        _, which, counts = torch.unique(classes, return_inverse=True, return_counts=True)
        return cls(1 / counts[which].double(), samples, seed)

    @classmethod
    def mixed(
        cls,
        sizes: Sequence[int],
        shares: Sequence[float],
        samples: int | None = None,
        seed: int = 0,
    ) -> "Weighted":
        """Of several sets (``Loader([a, b], sampler=...)``) these shares of the samples."""
        if len(sizes) != len(shares):
            raise ValueError(f"Weighted: {len(sizes)} sets and {len(shares)} shares")
        parts = [
            torch.full((size,), share / size, dtype=torch.float64)
            for size, share in zip(sizes, shares, strict=True)
        ]
        return cls(torch.cat(parts), samples, seed)

    def order(self, seed: int, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
        drawn = torch.rand(self.samples, dtype=torch.float64, generator=generator)
        return torch.searchsorted(self._sums, drawn, right=True).clamp_(max=len(self._sums) - 1)
