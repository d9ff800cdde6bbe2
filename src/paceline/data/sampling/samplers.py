"""Samplers for a DataLoader and for ``world.shard``, which splits their order between ranks.

Each order is a pure function of (seed, epoch).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from .sample_order import derive_seed, shuffled

WINDOW = 64  # blocks whose samples are shuffled together
BLOCK_BYTES = 4 << 20


class Ordered(Sampler[int]):
    """Sampler that yields all samples in the order of ``order(seed, epoch)``; default: by number.

    Attributes:
        epoch: Epoch of the next pass. It advances when a pass begins.
    """

    def __init__(self, samples: int, seed: int = 0) -> None:
        self.samples, self.seed, self.epoch = samples, seed, 0

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return iter(self.order(self.seed, epoch).tolist())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch

    def order(self, seed: int, epoch: int) -> torch.Tensor:
        """Return the order of the samples: an int64 tensor of shape (samples,)."""
        return torch.arange(self.samples)


class Shuffled(Ordered):
    """Sampler that yields a different random permutation of all samples in each epoch."""

    def order(self, seed: int, epoch: int) -> torch.Tensor:
        return shuffled(self.samples, seed, epoch)


class BlockShuffled(Ordered):
    """Block-wise shuffle, for storage with fast large reads and slow small reads.

    Blocks of consecutive samples are taken in random order, and the samples of each ``window`` of
    blocks are shuffled. If the dataset was packed in random order and the window is as large as
    many batches, the samples are mixed as well as by a permutation of all samples.

    Args:
        samples: Number of samples.
        block: Samples per block.
        seed: Seed of the order.
        window: Number of blocks that are shuffled together.
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
    """Sampler that draws samples with replacement, with probabilities proportional to weights.

    Args:
        weights: One non-negative weight per sample.
        samples: Samples per epoch. Default: the number of weights.
        seed: Seed of the order.

    Raises:
        ValueError: A weight is negative, or no weight is above zero.
    """

    def __init__(self, weights: Any, samples: int | None = None, seed: int = 0) -> None:
        each = torch.as_tensor(weights, dtype=torch.float64)
        if each.ndim != 1 or not len(each) or each.min() < 0 or each.sum() <= 0:
            raise ValueError(
                "Weighted: weights must be one number per sample, not negative and not all zero"
            )
        super().__init__(samples or len(each), seed)
        self._sums = each.cumsum(0) / each.sum()

    @classmethod
    def balanced(cls, labels: Any, samples: int | None = None, seed: int = 0) -> "Weighted":
        """Return a sampler that draws all classes equally often.

        For a packed dataset: ``Weighted.balanced(shards.labels())``.
        """
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
        """Return a sampler that draws from several datasets with the given proportions.

        For ``Loader([a, b], sampler=...)``.

        Args:
            sizes: Number of samples of each dataset.
            shares: Proportion of each dataset in the drawn samples.
            samples: Samples per epoch. Default: the samples of all datasets.
            seed: Seed of the order.

        Raises:
            ValueError: ``sizes`` and ``shares`` differ in length.
        """
        if len(sizes) != len(shares):
            raise ValueError(
                f"Weighted: there are {len(sizes)} sizes, but {len(shares)} shares. "
                "HINT: pass one share per dataset"
            )
        parts = [
            torch.full((size,), share / size, dtype=torch.float64)
            for size, share in zip(sizes, shares, strict=True)
        ]
        return cls(torch.cat(parts), samples, seed)

    def order(self, seed: int, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
        drawn = torch.rand(self.samples, dtype=torch.float64, generator=generator)
        return torch.searchsorted(self._sums, drawn, right=True).clamp_(max=len(self._sums) - 1)
