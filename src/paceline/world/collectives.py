"""Collectives on a few numbers, for decisions that are the same on all ranks."""

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist

from ..comm.group_device import exchangeable
from ..comm.members.exchange_objects import all_gather_objects
from ..parallel.mesh import Mesh


class Collectives:
    """The collectives of one world. Every rank must call each of them.

    Args:
        before: Called before each collective.
    """

    def __init__(self, mesh: Mesh, before: Callable[[], None]) -> None:
        self.mesh = mesh
        self._before = before

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Add the numbers of all data ranks in place, and return them, equal on all ranks.

        Of ranks that share samples the first one's count. The others' may differ in rounding, on
        which no decision of a script may depend.
        """
        self._before()
        if self.mesh.size > 1:
            if self.mesh.rank not in self._counted_ranks():
                numbers.zero_()
            self._reduce(numbers, dist.group.WORLD)
        return numbers

    def _counted_ranks(self) -> Collection[int]:
        return self.mesh.first_of_data_ranks if self.mesh.is_divided else (self.mesh.rank,)

    def sum_over_data(self, numbers: torch.Tensor) -> torch.Tensor:
        """Add the numbers of the data ranks that hold copies of this rank's part, in place.

        Only these call it: in a pipeline the ranks of the last stage.
        """
        self._before()
        if self.mesh.data_size > 1:
            self._reduce(numbers, self.mesh.data_group)
        return numbers

    def largest(self, numbers: torch.Tensor) -> None:
        """Replace numbers by the largest ones of all ranks."""
        self._reduce(numbers, dist.group.WORLD, dist.ReduceOp.MAX)

    def _reduce(
        self, numbers: torch.Tensor, group: Any, operation: Any = dist.ReduceOp.SUM
    ) -> None:
        sent = exchangeable(numbers, group)
        dist.all_reduce(sent, operation, group)
        if sent is not numbers:
            numbers.copy_(sent)

    def count(self, count: int) -> int:
        """Return the sum over all data ranks."""
        return int(self.sum(torch.tensor([count])).item())

    def any(self, flag: Any) -> bool:
        """Return whether ``flag`` is true on any rank."""
        if self.mesh.size == 1:
            return bool(flag)
        self._before()
        found = torch.tensor([float(bool(flag))])
        self._reduce(found, dist.group.WORLD)
        return bool(found.item())

    def from_rank_0(self, numbers: list[int]) -> list[int]:
        """Return the numbers of rank 0."""
        if self.mesh.size == 1:
            return numbers
        self._before()
        tensor = exchangeable(torch.tensor(numbers, dtype=torch.int64))
        dist.broadcast(tensor, 0)
        return [int(number) for number in tensor.tolist()]

    def gather(self, value: Any, schema: Any) -> list[Any]:
        """Return the values of all ranks, by rank; ``schema`` is their type."""
        if self.mesh.size == 1:
            return [value]
        self._before()
        return all_gather_objects(value, schema)

    def check_equal(self, value: int, otherwise: str) -> None:
        """Raise ValueError on all ranks, with this text, where a rank's value is not rank 0's."""
        (first,) = self.from_rank_0([value])
        if self.any(first != value):
            raise ValueError(f"world.batches: {otherwise}")
