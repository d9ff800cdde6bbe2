"""Keep batches of a training in memory and reuse them, so that input costs no time.

Batches come from DataLoaders, or from the iterators of ``keras.Model.fit`` with TensorFlow.
"""

import copy
import time
from collections.abc import Callable
from typing import Any

from ..hooks import keras_training, taps
from .observer import Observer

MAX_CACHED_BATCHES = 8  # per dataset; they are returned in rotation
_SOURCE = "_paceline_source"  # attribute of a loader: the data of the script that it was made for
_LENGTH = "_paceline_length"  # and the number of its batches


class CachedBatches:
    """A subscriber to ``DataLoader`` that caches batches and later returns them from memory.

    Batches are kept by the data that they are made of: the loader's dataset; of loaders that Keras
    makes anew for each epoch, what the script has passed to ``fit``.

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
        # By id of the data, with the data: an id is used again after the end of its object.
        self._batches: dict[int, tuple[Any, list[_Batch]]] = {}
        self._epoch_batches: Callable[[], Any] = _unknown  # of Keras' last iterator

    def install(self) -> None:
        """Subscribe to the batches and iterators of loaders, and to Keras' epochs."""
        taps.EPOCH.wrap(self._iterators)
        taps.BATCH.wrap(self._fetches)
        for module, kind in (
            (keras_training.TORCH_TRAINER, "TorchEpochIterator"),
            (keras_training.TENSORFLOW_TRAINER, "TFEpochIterator"),
        ):
            taps.Tap(module, f"{kind}.__init__").before(self._note_source)
        loaders = taps.Tap(keras_training.TORCH_TRAINER, "TorchEpochIterator._get_iterator")
        loaders.after(self._mark_loader)
        keras_training.next_batch = self.next_of_model

    def _iterators(self, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        class ReplayIterator(_BaseDataLoaderIter):
            """Replaces an iterator whose workers would not be used."""

            def __init__(self, loader: Any) -> None:
                self._dataset, self._num_yielded = loader.dataset, 0
                self._paceline_loader = loader

            def __len__(self) -> int:
                return len(self._paceline_loader)

        def new_iterator(loader: Any) -> Any:
            if self._is_replaying() and self._batches_of(_source(loader, loader.dataset)):
                return ReplayIterator(loader)
            start = time.perf_counter()
            iterator = make(loader)
            iterator._paceline_loader = loader
            iterator._paceline_opening = time.perf_counter() - start
            return iterator

        self._make_iterator, self._replay_iterator = make, ReplayIterator
        return new_iterator

    def _fetches(self, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def next_batch(iterator: Any) -> Any:
            loader = iterator.__dict__.get("_paceline_loader")
            without_workers = isinstance(iterator, self._replay_iterator)
            self._run_loader_only(
                iterator, fetch, lambda: self._make_iterator(loader), without_workers
            )
            source = _source(loader, iterator._dataset)
            batches = self._batches_of(source)
            if self._is_replaying() and batches:
                return self._next_cached(iterator, batches)
            start = time.perf_counter()
            try:
                batch = fetch(iterator)
            except StopIteration:  # its workers have ended by now
                self._observer.loader_stopped(id(source), time.perf_counter() - start)
                raise
            opening = iterator.__dict__.pop("_paceline_opening", None)
            seconds = time.perf_counter() - start
            self._observe(source, _length(iterator), batch, seconds, opening)
            self._keep(source, batches, batch)
            return batch

        return next_batch

    def _mark_loader(self, loader: Any, epoch: Any) -> None:
        """Mark a loader that Keras makes for an epoch with PyTorch."""
        if hasattr(loader, "dataset"):
            setattr(loader, _SOURCE, getattr(epoch, _SOURCE, loader.dataset))
            setattr(loader, _LENGTH, epoch.num_batches)

    def _note_source(self, epoch: Any, *_: Any, **kwargs: Any) -> None:
        """Note the data that Keras iterates over."""
        if "x" in kwargs:
            setattr(epoch, _SOURCE, kwargs["x"])
        self._epoch_batches = lambda: epoch.num_batches

    def next_of_model(self, model: Any, iterator: Any) -> Any:
        """Return the next batch for a training step of a Keras model with TensorFlow."""
        self._run_loader_only(iterator, next, _unknown, False)
        batches = self._batches_of(model)
        if self._is_replaying() and batches:
            self.replayed += 1
            return batches[self.replayed % len(batches)].restored()
        start = time.perf_counter()
        batch = next(iterator)
        seconds, opening = time.perf_counter() - start, None
        if id(model) not in self._batches:
            self._batches[id(model)] = (model, batches)
            opening = 0.0
        self._observe(model, self._epoch_batches() or float("inf"), batch, seconds, opening)
        self._keep(model, batches, batch)
        return batch

    def _batches_of(self, source: Any) -> "list[_Batch]":
        return self._batches.get(id(source), (source, []))[1]

    def _keep(self, source: Any, batches: "list[_Batch]", batch: Any) -> None:
        if len(batches) < MAX_CACHED_BATCHES and self._is_caching():
            batches.append(_Batch(batch))
            self._batches[id(source)] = (source, batches)

    def _observe(
        self, source: Any, length: float, batch: Any, seconds: float, opening: float | None
    ) -> None:
        """Report a fetch; opening: seconds for the iterator, whose first batch it is."""
        if opening is not None:
            self._observer.loader_started(id(source), opening + seconds, length)
        self._observer.batch_fetched(id(source), batch, seconds if opening is None else None)

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


def _source(loader: Any, dataset: Any) -> Any:
    """Return the data that the batches of a loader are made of."""
    return getattr(loader, _SOURCE, dataset)


def _length(iterator: Any) -> float:
    known = getattr(iterator.__dict__.get("_paceline_loader"), _LENGTH, None)
    try:
        return float(known or len(iterator))
    except TypeError:  # an IterableDataset without a length
        return float("inf")


def _unknown() -> None:
    """Stand for a number of batches, or for another iterator, that can't be had."""
