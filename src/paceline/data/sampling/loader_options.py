"""What a sharded loader takes from the user's ``DataLoader``."""

from typing import Any

from torch.utils.data import DataLoader

from ...plurals import counted

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


def global_batch_size(loader: DataLoader[Any], ranks: int, global_batch: int | None) -> int:
    """Return the global batch size in samples: as given, or the loader's batch size times ranks.

    Args:
        loader: The user's DataLoader.
        ranks: Number of ranks of the job at its full size.
        global_batch: Global batch size, or None.

    Raises:
        ValueError: The loader has no batch size, or ``global_batch`` is not divisible by ``ranks``.
    """
    if global_batch is None:
        if loader.batch_size is None:
            raise ValueError(
                "world.shard: the DataLoader has no batch_size. HINT: set batch_size (per "
                "rank), or call shard(loader, global_batch=...)"
            )
        return loader.batch_size * ranks
    if global_batch < ranks or global_batch % ranks:
        nearest = max(ranks, round(global_batch / ranks) * ranks)
        raise ValueError(
            f"world.shard: global_batch={global_batch} can't be divided by "
            f"{counted(ranks, 'rank')}. HINT: global_batch={nearest}"
        )
    return global_batch
