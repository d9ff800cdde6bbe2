"""The module of a model that is computing, for messages and records."""

import sys
import weakref

from torch import nn

from ...record.hooks.error_messages import script_line

# name and class; FSDP changes the classes of modules later
_names: "weakref.WeakKeyDictionary[nn.Module, tuple[str, str]]" = weakref.WeakKeyDictionary()


def note_names(model: nn.Module) -> None:
    """Note the names and classes of a model's modules."""
    for name, module in model.named_modules():
        _names[module] = (name, type(module).__name__)


def _running_module() -> nn.Module | None:
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in _names:
            return module
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return None


def module_name() -> str:
    """Return the name of the module whose code runs; "" for the model and outside of it."""
    module = _running_module()
    return "" if module is None else _names[module][0]


def layer() -> str:
    """Return the module whose code runs, with its class: "encoder.0 (Linear)"."""
    module = _running_module()
    if module is None:
        return "the script"
    name, kind = _names[module]
    return f"{name or 'the model'} ({kind})"


def place() -> str:
    """Return where the script is: " in encoder.0 (train.py:31)"."""
    name = module_name()
    return f"{f' in {name}' if name else ''} ({script_line()})"
