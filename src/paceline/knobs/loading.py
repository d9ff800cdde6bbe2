"""Knobs of loaders: workers and prefetching of torch's DataLoader, and the global batch.

A DataLoader is changed when it is first iterated with gradients enabled. Loaders that are iterated
with gradients disabled, as in validation, are not changed.

The global batch is the number of samples of a batch on all ranks together; a step of a script that
accumulates gradients trains several. ``world.shard`` takes it as its ``global_batch``. A plain
DataLoader of a training gets an equal part of it as its batch size: where it is made if it
shuffles, because scripts read ``len(loader)`` for their schedules; else when it is first iterated.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from ..record.hooks.taps import EPOCH
from ..record.hooks.taps import LOADER as LOADER_MADE
from .knob import KnobResult, request, requested

BATCH = "global-batch"
ACCUMULATE = "accumulate-batches"
SHARD = "world.shard"  # in the record: how the batch was set
LOADER = "loader"
_is_sharded = False  # whether world.shard has set the global batch


def workers(count: int, turned: KnobResult) -> None:
    """Use persistent worker processes; prefetch 2 batches per worker unless the script says."""

    def change(loader: Any) -> None:
        loader.num_workers = count
        _set(loader, "persistent_workers", True)
        loader.prefetch_factor = loader.prefetch_factor or 2

    each_loader(change, turned, _streams)


def persistent(_: bool, turned: KnobResult) -> None:
    each_loader(lambda loader: _set(loader, "persistent_workers", True), turned, _has_none)


def prefetch(count: int, turned: KnobResult) -> None:
    each_loader(lambda loader: setattr(loader, "prefetch_factor", count), turned, _has_none)


def pinned(_: bool, turned: KnobResult) -> None:
    def change(loader: Any) -> None:
        loader.pin_memory = True

    def unfit(loader: Any) -> str:
        import torch

        return "" if torch.cuda.is_available() else "there is no GPU to copy batches to"

    each_loader(change, turned, unfit)


def _set(loader: Any, name: str, value: Any) -> None:
    """Set an attribute that DataLoader reads when it is iterated.

    DataLoader.__setattr__ rejects changes of this attribute after construction.
    """
    loader.__dict__[name] = value


def _streams(loader: Any) -> str:
    from torch.utils.data import IterableDataset

    stream = isinstance(loader.dataset, IterableDataset)
    return (
        "its dataset is an IterableDataset, and each worker would read all of it" if stream else ""
    )


def _has_none(loader: Any) -> str:
    return _streams(loader) or ("" if loader.num_workers else "the loader has no workers")


def each_loader(
    change: Callable[[Any], None], turned: KnobResult, unfit: Callable[[Any], str]
) -> None:
    """Register a change of every training loader; changes are made in the order of the calls.

    ``unfit`` returns why a loader cannot be changed, or "".
    """
    _changes.append((change, turned, unfit))
    if len(_changes) == 1:
        EPOCH.before(_change)


_changes: list[tuple[Callable[[Any], None], KnobResult, Callable[[Any], str]]] = []


def _change(loader: Any) -> None:
    """Change a loader that is iterated for the first time."""
    import torch

    if torch.is_grad_enabled() and "_paceline_knobs" not in loader.__dict__:
        loader.__dict__["_paceline_knobs"] = True
        for change, turned, unfit in _changes:
            if why := unfit(loader):
                turned.not_done(why)
            else:
                change(loader)
                turned.done()


# The global batch


def global_batch(value: int, turned: KnobResult) -> None:
    """Set the global batch of all training loaders of this process."""
    request(value, turned)
    change, unfit = partial(_set_batch, value), partial(_unfit_batch, value)
    each_loader(change, turned, unfit)

    def made(_: None, loader: Any, *__: Any, **___: Any) -> None:
        """Set the batch of loaders that shuffle where they are made."""
        if not _is_sharded and _shuffles(loader) and not unfit(loader):
            change(loader)
            turned.done(LOADER)

    LOADER_MADE.after(made)


def requested_global_batch() -> int | None:
    """Return the global batch for a loader that ``world.shard`` splits; None: as the script says.

    The record then says that the batch was set by ``world.shard``.
    """
    global _is_sharded
    value: int | None = requested(BATCH, SHARD)
    _is_sharded = value is not None
    return value


def requested_accumulation() -> int:
    """Return the factor of the batches that ``world.distribute`` accumulates."""
    return requested(ACCUMULATE) or 1


def _ranks() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() else 1


def _unfit_batch(value: int, loader: Any) -> str:
    """Return why the batch size of a loader cannot be set, or ""."""
    if _is_sharded:
        return ""
    if value % _ranks():
        return f"{value} samples can't be divided by {_ranks()} ranks"
    batches = loader.batch_sampler
    if batches is None:
        return "the DataLoader has no batch size: its dataset makes the batches"
    if not isinstance(getattr(batches, "batch_size", None), int):
        return f"the DataLoader's batch_sampler ({type(batches).__name__}) chooses the batches"
    return ""


def _set_batch(value: int, loader: Any) -> None:
    if _is_sharded:  # its batches are made by world.shard
        return
    size = value // _ranks()
    loader.batch_sampler.batch_size = size
    loader.__dict__["batch_size"] = size  # DataLoader.__setattr__ rejects it after construction


def _shuffles(loader: Any) -> bool:
    from torch.utils.data import DistributedSampler, RandomSampler

    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    return isinstance(sampler, RandomSampler)
