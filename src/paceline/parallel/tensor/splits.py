"""How one dim of a tensor is divided over the ranks of the tensor axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True)
class Split:
    """A dim of which each rank holds an equal part.

    Attributes:
        dim: The divided dim, from 0.
        blocks: The dim consists of so many equal blocks, and each rank holds a part of each block,
            such as its heads of queries, keys and values in one weight.
    """

    dim: int
    blocks: int = 1

    def divides(self, extent: int, ranks: int) -> bool:
        """Return whether an extent of the dim can be divided."""
        return extent > 0 and extent % (self.blocks * ranks) == 0

    def cut(self, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """Return a rank's piece: a view if there is one block."""
        extent = whole.shape[self.dim]
        if self.blocks == 1:
            return whole.narrow(self.dim, rank * (extent // ranks), extent // ranks)
        inner = extent // (self.blocks * ranks)
        parts = whole.unflatten(self.dim, (self.blocks, ranks, inner))
        piece: torch.Tensor = parts.select(self.dim + 1, rank).flatten(self.dim, self.dim + 1)
        return piece

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor of the pieces of all ranks."""
        if self.blocks == 1:
            return torch.cat(list(pieces), self.dim)
        inner = pieces[0].shape[self.dim] // self.blocks
        parts = [piece.unflatten(self.dim, (self.blocks, inner)) for piece in pieces]
        return torch.stack(parts, self.dim + 1).flatten(self.dim, self.dim + 2)

    def whole_shape(self, local: Sequence[int], ranks: int) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return tuple(n * ranks if i == self.dim else n for i, n in enumerate(local))

    def local_shape(self, whole: Sequence[int], ranks: int) -> tuple[int, ...]:
        """Return the shape of a piece."""
        return tuple(n // ranks if i == self.dim else n for i, n in enumerate(whole))

    def at(self, dim: int) -> "Split":
        """Return the same division of another dim."""
        return Split(dim, self.blocks)


def moved_split(
    shape: tuple[int, ...], split: Split, ranks: int, target: tuple[int, ...]
) -> Split | None:
    """Return the division of a reshaped tensor; None if its pieces are no part of one dim.

    The elements of a tensor in order are [outer blocks, ranks, inner elements]. The target must
    have a dim in which these three lie.
    """
    outer = prod(shape[: split.dim]) * split.blocks
    inner = shape[split.dim] // (split.blocks * ranks) * prod(shape[split.dim + 1 :])
    before = 1
    for dim, extent in enumerate(target):
        after = prod(target[dim + 1 :])
        if extent > 1 and outer % before == 0 and inner % max(after, 1) == 0 and after:
            blocks = outer // before
            if extent % (blocks * ranks) == 0 and blocks * ranks * (inner // after) == extent:
                return Split(dim, blocks)
        before *= extent
    return None
