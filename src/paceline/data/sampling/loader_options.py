"""What a sharded loader takes from the user's ``DataLoader``."""

import operator
from typing import Any

from torch.utils.data import DataLoader

from ...plurals import counted
from .batch_schedule import BatchSchedule

_COPIED = (  # options of the user's DataLoader that the sharded loader takes over
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device"),
)


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
