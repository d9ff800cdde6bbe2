"""Collectives on a few numbers, for decisions that are the same on all ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..comm.group_device import exchangeable
from ..comm.members.exchange_objects import all_gather_objects


class Collectives:
    """The collectives of one world. Every rank must call each of them.

    size: number of ranks. before: called before each collective.
    """

    def __init__(self, size: int, before: Callable[[], None]) -> None:
        self.size = size
        self._before = before

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Add the numbers of all ranks in place, and return them."""
        self._before()
        if self.size > 1:
            sent = exchangeable(numbers)
            dist.all_reduce(sent)
            if sent is not numbers:
                numbers.copy_(sent)
        return numbers

    def count(self, count: int) -> int:
        """Return the sum over all ranks."""
        return int(self.sum(torch.tensor([count])).item())

    def any(self, flag: Any) -> bool:
        """Return whether ``flag`` is true on any rank."""
        if self.size == 1:
            return bool(flag)
        return bool(self.sum(torch.tensor([float(bool(flag))])).item())

    def from_rank_0(self, numbers: list[int]) -> list[int]:
        """Return the numbers of rank 0."""
        if self.size == 1:
            return numbers
        self._before()
        tensor = exchangeable(torch.tensor(numbers, dtype=torch.int64))
        dist.broadcast(tensor, 0)
        return [int(number) for number in tensor.tolist()]

    def gather(self, value: Any, schema: Any) -> list[Any]:
        """Return the values of all ranks, by rank; ``schema`` is their type."""
        if self.size == 1:
            return [value]
        self._before()
        return all_gather_objects(value, schema)

    def check_equal(self, value: int, otherwise: str) -> None:
        """Raise ValueError on all ranks, with this text, where a rank's value is not rank 0's."""
        (first,) = self.from_rank_0([value])
        if self.any(first != value):
            raise ValueError(f"world.batches: {otherwise}")
