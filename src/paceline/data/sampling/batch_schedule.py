"""Global batch sizes that change between epochs."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True)
class BatchSchedule:
    """Global batch size of each epoch, for ``world.shard(loader, global_batch=schedule)``.

    ``BatchSchedule({0: 64, 5: 128, 20: 512})`` trains epochs 0 to 4 with 64 samples, 5 to 19 with
    128, and later ones with 512. A checkpoint contains the schedule.

    Args:
        sizes: Samples of a batch of all ranks, by the first epoch that has it; epoch 0 is needed.

    Raises:
        ValueError: No size for epoch 0, an epoch below 0, or a size below 1.
    """

    sizes: Mapping[int, int]

    def __post_init__(self) -> None:
        try:
            sizes = {operator.index(key): operator.index(of) for key, of in self.sizes.items()}
        except (AttributeError, TypeError):
            self._refuse("sizes must be whole numbers of samples by epoch")
        if 0 not in sizes:
            self._refuse("epoch 0 has no size")
        if min(sizes) < 0 or min(sizes.values()) < 1:
            self._refuse("epochs begin at 0, and a batch has at least 1 sample")
        object.__setattr__(self, "sizes", dict(sorted(sizes.items())))

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(
            f"BatchSchedule({self.sizes}): {why}. HINT: BatchSchedule({{0: 64, 5: 128}}) trains "
            "epochs 0 to 4 with 64 samples, and later ones with 128"
        )

    def __str__(self) -> str:
        """Return it as it is written in a script; a size that does not change as a number."""
        return f"paceline.BatchSchedule({self.sizes})" if self.changes else str(self.sizes[0])

    @property
    def changes(self) -> bool:
        """Whether the size changes."""
        return len(set(self.sizes.values())) > 1

    @property
    def largest(self) -> int:
        return max(self.sizes.values())

    def at(self, epoch: int) -> int:
        """Return the size of an epoch."""
        return self.sizes[max(first for first in self.sizes if first <= epoch)]

    def first_difference(self, other: "BatchSchedule") -> int | None:
        """Return the first epoch in which two schedules differ; None if there is none."""
        firsts = sorted({*self.sizes, *other.sizes})
        return next((epoch for epoch in firsts if self.at(epoch) != other.at(epoch)), None)
