"""Keep batches of a script's DataLoaders in memory and reuse them, so that input costs no time."""

import copy
import time
from collections.abc import Callable
from typing import Any

from .observer import Observer

MAX_CACHED_BATCHES = 8  # per dataset; they are returned in rotation


class CachedBatches:
    """A patch of ``DataLoader`` that caches batches and later returns them from memory.

    Args:
        observer: Receives the durations of fetches and of loader starts.
        is_caching: Whether fetched batches are to be cached now.
        is_replaying: Whether batches come from memory now.
        run_loader_only: Called before each fetch. In the phase that measures the loader alone it
            does not return.
    """

    def __init__(
        self,
        observer: Observer,
        is_caching: Callable[[], bool],
        is_replaying: Callable[[], bool],
        run_loader_only: Callable[..., None],
    ) -> None:
        self.replayed = 0  # batches that came from memory
        self.convert: Callable[[Any], Any] | None = None  # applied to each leaf of such a batch
        self._observer, self._run_loader_only = observer, run_loader_only
        self._is_caching, self._is_replaying = is_caching, is_replaying
        self._batches: dict[int, list[_Batch]] = {}  # by id of the dataset

    def install(self, module: Any) -> None:
        """Patch ``module``, which is ``torch.utils.data.dataloader``."""
        iterator_class, loader_class = module._BaseDataLoaderIter, module.DataLoader
        fetch, make_iterator = iterator_class.__next__, loader_class.__iter__

        def next_batch(iterator: Any) -> Any:
            loader = iterator.__dict__.get("_paceline_loader")
            without_workers = isinstance(iterator, ReplayIterator)
            self._run_loader_only(iterator, fetch, lambda: make_iterator(loader), without_workers)
            batches = self._batches.get(id(iterator._dataset), [])
            if self._is_replaying() and batches:
                return self._next_cached(iterator, batches)
            start = time.perf_counter()
            try:
                batch = fetch(iterator)
            except StopIteration:  # its workers have ended by now
                self._observer.loader_stopped(id(iterator._dataset), time.perf_counter() - start)
                raise
            self._observe(iterator, batch, time.perf_counter() - start)
            if len(batches) < MAX_CACHED_BATCHES and self._is_caching():
                batches.append(_Batch(batch))
                self._batches[id(iterator._dataset)] = batches
            return batch

        class ReplayIterator(iterator_class):  # type: ignore[misc, valid-type]
            """Replaces an iterator whose workers would not be used."""

            def __init__(self, loader: Any) -> None:
                self._dataset, self._num_yielded = loader.dataset, 0
                self._paceline_loader = loader

            def __len__(self) -> int:
                return len(self._paceline_loader)

        def new_iterator(loader: Any) -> Any:
            if self._is_replaying() and id(loader.dataset) in self._batches:
                return ReplayIterator(loader)
            start = time.perf_counter()
            iterator = make_iterator(loader)
            iterator._paceline_loader = loader
            iterator._paceline_opening = time.perf_counter() - start
            return iterator

        iterator_class.__next__, loader_class.__iter__ = next_batch, new_iterator

    def _observe(self, iterator: Any, batch: Any, seconds: float) -> None:
        opening = iterator.__dict__.pop("_paceline_opening", None)
        dataset = id(iterator._dataset)
        if opening is not None:
            self._observer.loader_started(dataset, opening + seconds, _length(iterator))
        self._observer.batch_fetched(dataset, batch, seconds if opening is None else None)

    def _next_cached(self, iterator: Any, batches: "list[_Batch]") -> Any:
        yielded = iterator.__dict__.setdefault("_paceline_given", iterator._num_yielded)
        if yielded >= _length(iterator):
            raise StopIteration
        iterator._paceline_given += 1
        self.replayed += 1
        batch = batches[self.replayed % len(batches)].restored()
        return batch if self.convert is None else _map_leaves(batch, self.convert)


class _Batch:
    """A cached batch that can be returned many times, even if the script modifies it in place."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._pristine = _map_leaves(batch, _copy_leaf)
        self._versions = _tensor_versions(batch)

    def restored(self) -> Any:
        """Return the batch in new containers, with the values that came from the loader."""
        if _tensor_versions(self._batch) != self._versions:  # modified in place by the script
            self._batch = _map_leaves(self._pristine, _copy_leaf)
            self._versions = _tensor_versions(self._batch)
        return _map_leaves(self._batch, lambda leaf: leaf)


def _map_leaves(batch: Any, function: Callable[[Any], Any]) -> Any:
    from torch.utils._pytree import tree_map

    return tree_map(function, batch)


def _tensor_versions(batch: Any) -> list[int]:
    from torch.utils._pytree import tree_leaves

    return [getattr(leaf, "_version", 0) for leaf in tree_leaves(batch)]


def _copy_leaf(leaf: Any) -> Any:
    if not hasattr(leaf, "clone"):
        return copy.copy(leaf)
    made = leaf.clone()
    return made.pin_memory() if getattr(leaf, "is_pinned", bool)() else made


def _length(iterator: Any) -> float:
    try:
        return float(len(iterator))
    except TypeError:  # an IterableDataset without a length
        return float("inf")
