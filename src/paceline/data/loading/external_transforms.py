"""Adapters for the transforms of other packages, as functions of (x, rng)."""

import copy
import threading
from collections.abc import Callable
from typing import Any


def adapt_transform(transform: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return the function that a Loader calls: an adapter for albumentations, else ``transform``.

    Raises:
        ValueError: The installed albumentations has no per-sample seed (older than version 2).
    """
    if transform is None or not type(transform).__module__.startswith("albumentations"):
        return transform
    if not hasattr(transform, "set_random_seed"):
        raise ValueError(
            "Loader: this version of albumentations can't be seeded for each sample. "
            "HINT: pip install 'albumentations>=2'"
        )
    return AlbumentationsTransform(transform)


class AlbumentationsTransform:
    """Adapter for an albumentations transform, ``A.Compose([...])``, seeded for each sample.

    The transform contains a random generator, so each thread uses its own copy of the transform.
    """

    def __init__(self, transform: Any) -> None:
        self.transform, self._threads = transform, threading.local()

    def __call__(self, x: Any, rng: Any) -> Any:
        own = getattr(self._threads, "own", None)
        if own is None:
            own = self._threads.own = copy.deepcopy(self.transform)
        own.set_random_seed(int(rng.integers(1 << 31)))
        return own(image=x)["image"]
