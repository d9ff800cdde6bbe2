"""Assign samples to global batches, and parts of each global batch to ranks.

The assignment is a pure function of (seed, epoch) and of positions. So every rank can compute the
part of every other rank, and no communication is needed to know the size of an uneven batch.
"""

import random
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


def derive_seed(*numbers: int) -> int:
    """Derive a 63-bit seed from several numbers; nearby inputs give unrelated seeds."""
    value = 0x9E3779B97F4A7C15
    for number in numbers:
        value ^= number & 0xFFFFFFFFFFFFFFFF
        # the finalizer of splitmix64 (Steele, Lea, Flood: OOPSLA 2014)
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value >> 1


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch, Python and, if it is imported, NumPy."""
    torch.manual_seed(seed)
    seed_cpu_generators(seed)


def seed_cpu_generators(seed: int) -> None:
    """Seed the global CPU generators, those that ``preserve_random_states`` restores."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def cpu_random_states() -> tuple[Any, ...]:
    """Return the states of the global CPU random generators, which can be compared."""
    numpy = sys.modules.get("numpy")
    name, keys, *rest = numpy.random.get_state() if numpy else ("", None)
    words = None if keys is None else keys.tobytes()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), name, words, *rest


@contextmanager
def preserve_random_states() -> Iterator[None]:
    """Restore the states of the global CPU random generators on exit."""
    states = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy:
            numpy.random.set_state(numpy_state)


@dataclass(frozen=True)
class BatchShare:
    """One rank's part of one global batch.

    Attributes:
        position: Number of the global batch in the epoch.
        count: Samples of this rank.
        total: Samples of the global batch.
        filler: Whether the rank has no sample of its own, because there are fewer samples than
            ranks. It then repeats one with weight zero, to take part in the collectives.
        last: Whether the batch is the last one of the epoch.
    """

    position: int
    count: int
    total: int
    filler: bool = False
    last: bool = False


@dataclass(frozen=True)
class BatchSplit:
    """Split of an epoch into global batches, and of each global batch between ranks.

    Attributes:
        samples: Samples per epoch.
        batch: Samples per global batch.
        ranks: Number of ranks.
        drop_last: Whether to drop the last global batch if it is smaller.
        first: Samples of the epoch before the first batch.
    """

    samples: int
    batch: int
    ranks: int
    drop_last: bool = False
    first: int = 0

    def __len__(self) -> int:
        full, rest = divmod(self.samples - self.first, self.batch)
        return full if self.drop_last or not rest else full + 1

    def total(self, position: int) -> int:
        """Return the number of samples in the global batch at ``position``."""
        return min(self.batch, self.samples - self.start(position))

    def start(self, position: int) -> int:
        """Return the number of samples before the global batch at ``position``."""
        return self.first + position * self.batch

    def bounds(self, position: int, rank: int) -> tuple[int, int]:
        """Return the range of a rank's samples in the epoch's order: first, last + 1.

        The sizes of the ranges differ by at most one between ranks.
        """
        each, more = divmod(self.total(position), self.ranks)
        first = self.start(position) + rank * each + min(rank, more)
        return first, first + each + (rank < more)

    def share(self, position: int, rank: int) -> BatchShare:
        first, end = self.bounds(position, rank)
        return BatchShare(
            position,
            count=end - first,
            total=self.total(position),
            filler=end == first,
            last=position == len(self) - 1,
        )

    def group_total(self, position: int, accumulate: int) -> int:
        """Return the number of samples in the micro-batches accumulated with ``position``."""
        if accumulate == 1:
            return self.total(position)
        first = position - position % accumulate
        return sum(self.total(p) for p in range(first, min(first + accumulate, len(self))))


def shuffled(samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return a permutation of ``samples`` numbers (int64) that depends only on seed and epoch."""
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
    return torch.randperm(samples, generator=generator)


def checksum(order: torch.Tensor) -> int:
    """Return the CRC-32 of an order, to compare it between ranks."""
    return zlib.crc32(order.numpy().tobytes())
