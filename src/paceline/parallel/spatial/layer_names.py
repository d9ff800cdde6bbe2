"""The layer of a model that is computing, for messages and records."""

import sys
import weakref

from torch import nn

_names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def name_modules(model: nn.Module) -> None:
    """Note the names of a model's modules."""
    _names.update((module, name or "the model") for name, module in model.named_modules())


def layer() -> str:
    """Return the layer of the model that is computing."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in _names:
            return f"{_names[module]} ({type(module).__name__})"
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return "the script"
