"""What the parts of a ``DataLoader`` and of a stream have in common, and take from the user's."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from ...plurals import counted
from .batch_schedule import BatchSchedule
from .sample_order import BatchShare

_COPIED = (  # options of the user's DataLoader that the sharded loader takes over
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device"),
)


class RankLoader(ABC):
    """One rank's part of a DataLoader.

    ``iterate(epoch, start)`` yields ``(batch, share)``. ``iter(loader)`` yields batches only;
    each call iterates over the next epoch, from epoch 0 or that of ``set_epoch``.

    Attributes:
        name: The user's DataLoader, for messages.
        schedule: Global batch size of each epoch.
        is_branch: Whether the run compares batch sizes from one checkpoint.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        rank: int,
        ranks: int,
        seed: int,
        full_ranks: int | None = None,
        global_batch: int | BatchSchedule | None = None,
        every_sample_once: bool = False,
    ) -> None:
        self.rank, self.ranks, self.seed = rank, ranks, seed
        self.every_sample_once = every_sample_once
        self.name = f"DataLoader({type(loader.dataset).__name__})"
        self.is_branch = False
        self.schedule = batch_schedule(loader, full_ranks or ranks, global_batch)
        self._epoch = 0

    @abstractmethod
    def begin_epoch(self, epoch: int) -> None:
        """Set the batch size to that of an epoch."""

    @abstractmethod
    def iterate(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, BatchShare]]:
        """Yield (batch, share) of this rank, from position ``start`` of ``epoch``."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next ``iter(loader)``."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        self.begin_epoch(epoch)
        return (batch for batch, _ in self.iterate(epoch))


def loader_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options of the user's DataLoader that a sharded loader takes over."""
    options = {name: getattr(loader, name) for name in _COPIED if hasattr(loader, name)}
    if not options.get("pin_memory_device"):
        options.pop("pin_memory_device", None)
    return options


def batch_schedule(
    loader: DataLoader[Any], ranks: int, global_batch: int | BatchSchedule | None
) -> BatchSchedule:
    """Return the global batch sizes in samples: as given, or the loader's batch size times ranks.

    Args:
        loader: The user's DataLoader.
        ranks: Number of ranks of the job at its full size.
        global_batch: Global batch size, or None.

    Raises:
        ValueError: The loader has no batch size, or a size is not divisible by ``ranks``.
    """
    if global_batch is None:
        if loader.batch_size is None:
            raise ValueError(
                "world.shard: the DataLoader has no batch_size. HINT: set batch_size (per "
                "rank), or call shard(loader, global_batch=...)"
            )
        return BatchSchedule({0: loader.batch_size * ranks})
    if isinstance(global_batch, BatchSchedule):
        sizes, of = dict(global_batch.sizes), f" of {global_batch}"
    else:
        sizes, of = {0: _whole(global_batch)}, ""
    nearest = {epoch: max(ranks, round(size / ranks) * ranks) for epoch, size in sizes.items()}
    for epoch, size in sizes.items():
        if size != nearest[epoch]:
            where = f" (epoch {epoch}{of})" if of else ""
            raise ValueError(
                f"world.shard: global_batch={size} can't be divided by {counted(ranks, 'rank')}"
                f"{where}. HINT: global_batch={BatchSchedule(nearest)}"
            )
    return BatchSchedule(sizes)


def _whole(global_batch: Any) -> int:
    try:
        return operator.index(global_batch)
    except TypeError:
        raise ValueError(
            f"world.shard: global_batch must be a number or a BatchSchedule; this is "
            f"{global_batch!r}. HINT: global_batch=paceline.BatchSchedule({{0: 64, 5: 128}})"
        ) from None
