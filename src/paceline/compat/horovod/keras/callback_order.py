"""Check the order of a script's callbacks: some change what others read."""

import sys
from collections.abc import Sequence
from typing import Any

from .library import keras

# Callbacks that decide by a metric. Ranks with different values would decide differently, and wait
# for each other for ever.
DECIDING = ("EarlyStopping", "ReduceLROnPlateau")


def other_callbacks() -> list[Any]:
    """Return the list of callbacks that contains the calling one, in order.

    To be called in ``on_train_begin``. [] if it is not known.
    """
    found: Any = None
    frame = sys._getframe(1)
    for _ in range(4):
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList):
            found = owner
            break
        if frame.f_back is None:
            break
        frame = frame.f_back
    own_kinds = (keras.callbacks.History, keras.callbacks.ProgbarLogger)
    listed = found.callbacks if found is not None else ()
    return [one for one in listed if not isinstance(one, own_kinds)]


def check_metrics_are_averaged(own: Any, callbacks: Sequence[Any]) -> None:
    """Raise ValueError if a callback that decides by a metric comes before ``own``."""
    before = callbacks[: callbacks.index(own)] if own in callbacks else ()
    deciding = tuple(getattr(keras.callbacks, name) for name in DECIDING)
    for one in before:
        if isinstance(one, deciding):
            raise ValueError(
                f"{type(own).__name__} comes after {type(one).__name__}, which would decide by the "
                "metric of its own rank, differently on each rank. HINT: put "
                f"{type(own).__name__}() before it in callbacks=[...]"
            )
