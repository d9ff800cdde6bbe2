"""Names of modules for messages."""

import sys
import weakref

from torch import nn

from ...record.hooks.error_messages import script_line

_names: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()


def note_names(model: nn.Module) -> None:
    """Note the names of a model's modules."""
    _names.update({module: name for name, module in model.named_modules() if name})


def module_name() -> str:
    """Return the name of the module whose code runs; "" where it has none."""
    frame = sys._getframe(1)
    while frame is not None:
        own = frame.f_locals.get("self")
        is_call = frame.f_code.co_name in ("_call_impl", "_wrapped_call_impl")
        if isinstance(own, nn.Module) and own in _names and not is_call:
            return _names[own]
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def place() -> str:
    """Return where the script is: " in encoder.0 (train.py:31)"."""
    name = module_name()
    return f"{f' in {name}' if name else ''} ({script_line()})"
