"""Knob of the global batch: samples of a batch on all ranks together.

A step of a script that accumulates gradients trains several batches.

``world.shard`` takes it as its ``global_batch``. A plain DataLoader of a training gets an equal
part of it as its batch size: where it is made if it shuffles, because scripts read ``len(loader)``
for their schedules; else when it is first iterated with gradients enabled.
"""

import os
from typing import Any, ClassVar

from ...record.hooks.taps import LOADER as LOADER_MADE
from ..apply import KnobResult
from .loader import each_loader

NAME = "global-batch"
ACCUMULATE = "accumulate-batches"
SHARD = "world.shard"  # in the record: how the batch was set
LOADER = "loader"


class _Requested:
    """The global batch that was requested for this process."""

    value: ClassVar[int | None] = None
    turned: ClassVar[KnobResult | None] = None
    is_sharded: ClassVar[bool] = False
    batches: ClassVar[int] = 1
    accumulation: ClassVar[KnobResult | None] = None


def global_batch(value: int, turned: KnobResult) -> None:
    """Set the global batch of all training loaders of this process."""
    _Requested.value, _Requested.turned = value, turned
    each_loader(lambda loader: _change(loader, value), turned, lambda loader: _unfit(loader, value))

    def made(_: None, loader: Any, *__: Any, **___: Any) -> None:
        """Set the batch of loaders that shuffle where they are made."""
        if not _Requested.is_sharded and _shuffles(loader) and not _unfit(loader, value):
            _change(loader, value)
            turned.done(LOADER)

    LOADER_MADE.after(made)


def requested_global_batch() -> int | None:
    """Return the global batch for a loader that ``world.shard`` splits; None: as the script says.

    The record then says that the batch was set by ``world.shard``.
    """
    if _Requested.turned is not None:
        _Requested.is_sharded = True
        _Requested.turned.done(SHARD)
    return _Requested.value


def accumulate(value: int, turned: KnobResult) -> None:
    """Accumulate the gradients of so many batches for each one of ``world.distribute``."""
    _Requested.batches, _Requested.accumulation = value, turned


def requested_accumulation() -> int:
    """Return the factor of the batches that ``world.distribute`` accumulates."""
    if _Requested.accumulation is not None:
        _Requested.accumulation.done()
    return _Requested.batches


def _ranks() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() else 1


def _unfit(loader: Any, value: int) -> str:
    """Return why the batch size of a loader cannot be set, or ""."""
    if _Requested.is_sharded:
        return ""
    if value % _ranks():
        return f"{value} samples can't be divided by {_ranks()} ranks"
    batches = loader.batch_sampler
    if batches is None:
        return "the DataLoader has no batch size: its dataset makes the batches"
    if not isinstance(getattr(batches, "batch_size", None), int):
        return f"the DataLoader's batch_sampler ({type(batches).__name__}) chooses the batches"
    return ""


def _change(loader: Any, value: int) -> None:
    if _Requested.is_sharded:  # its batches are made by world.shard
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
