"""Batches of a script's DataLoaders, kept in memory and given in turns: a training whose input
costs nothing."""

import copy
import time
from collections.abc import Callable
from typing import Any

from .observer import Observer

MAX_CACHED_BATCHES = 8  # batches of a dataset that are kept, and given in turns


class CachedBatches:
    """keeping: whether batches are to be kept now; giving: whether they come from memory. alone:
    is called first; where the loader is to be asked for its own sake it does not return."""

    def __init__(
        self,
        observer: Observer,
        keeping: Callable[[], bool],
        giving: Callable[[], bool],
        alone: Callable[..., None],
    ) -> None:
        self.given = 0  # batches that came from memory
        self._observer, self._keeping, self._giving, self._alone = observer, keeping, giving, alone
        self._kept: dict[int, list[_Batch]] = {}  # by dataset
        self.images: Callable[[Any], Any] | None = None  # what each tensor becomes

    def install(self, module: Any) -> None:
        """module: torch.utils.data.dataloader."""
        kind, loader = module._BaseDataLoaderIter, module.DataLoader
        fetch, make = kind.__next__, loader.__iter__

        def next_batch(iterator: Any) -> Any:
            loader = iterator.__dict__.get("_paceline_loader")
            self._alone(iterator, fetch, lambda: make(loader), isinstance(iterator, FromMemory))
            kept = self._kept.get(id(iterator._dataset), [])
            if self._giving() and kept:
                return self._next(iterator, kept)
            start = time.perf_counter()
            try:
                batch = fetch(iterator)
            except StopIteration:  # by now its workers have ended
                self._observer.closed(id(iterator._dataset), time.perf_counter() - start)
                raise
            self._seen(iterator, batch, time.perf_counter() - start)
            if len(kept) < MAX_CACHED_BATCHES and self._keeping():
                kept.append(_Batch(batch))
                self._kept[id(iterator._dataset)] = kept
            return batch

        class FromMemory(kind):  # type: ignore[misc, valid-type]
            """In the place of an iterator with workers that nobody would ask."""

            def __init__(self, loader: Any) -> None:
                self._dataset, self._num_yielded = loader.dataset, 0
                self._paceline_loader = loader

            def __len__(self) -> int:
                return len(self._paceline_loader)

        def new_iterator(asked: Any) -> Any:
            if self._giving() and id(asked.dataset) in self._kept:
                return FromMemory(asked)
            start = time.perf_counter()
            made = make(asked)
            made._paceline_loader = asked
            made._paceline_opening = time.perf_counter() - start
            return made

        kind.__next__, loader.__iter__ = next_batch, new_iterator

    def _seen(self, iterator: Any, batch: Any, seconds: float) -> None:
        opening = iterator.__dict__.pop("_paceline_opening", None)
        data = id(iterator._dataset)
        if opening is not None:
            self._observer.opened(data, opening + seconds)
        self._observer.fetched(data, batch, seconds if opening is None else None)

    def _next(self, iterator: Any, kept: "list[_Batch]") -> Any:
        done = iterator.__dict__.setdefault("_paceline_given", iterator._num_yielded)
        if done >= _length(iterator):
            raise StopIteration
        iterator._paceline_given += 1
        self.given += 1
        batch = kept[self.given % len(kept)].given()
        return batch if self.images is None else _mapped(batch, self.images)


class _Batch:
    """A batch that is given again and again, whatever the script does with it."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._pristine = _mapped(batch, _copied)
        self._versions = _versions(batch)

    def given(self) -> Any:
        """In containers of its own, whose tensors are as they came from the loader."""
        if _versions(self._batch) != self._versions:  # changed in place by the script
            self._batch = _mapped(self._pristine, _copied)
            self._versions = _versions(self._batch)
        return _mapped(self._batch, lambda leaf: leaf)


def _mapped(batch: Any, function: Callable[[Any], Any]) -> Any:
    from torch.utils._pytree import tree_map

    return tree_map(function, batch)


def _versions(batch: Any) -> list[int]:
    from torch.utils._pytree import tree_leaves

    return [getattr(leaf, "_version", 0) for leaf in tree_leaves(batch)]


def _copied(leaf: Any) -> Any:
    return leaf.clone() if hasattr(leaf, "clone") else copy.copy(leaf)


def _length(iterator: Any) -> float:
    try:
        return float(len(iterator))
    except TypeError:  # a stream
        return float("inf")
