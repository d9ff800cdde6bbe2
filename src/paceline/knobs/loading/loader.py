"""Knobs of torch's DataLoader, set when a loader is first iterated with gradients enabled.

Loaders that are iterated with gradients disabled, as in validation, are not changed.
"""

from collections.abc import Callable
from typing import Any

from ...record.hooks.taps import EPOCH
from ..apply import KnobResult


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
