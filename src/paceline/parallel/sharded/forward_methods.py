"""Methods of a model that compute like its forward: gather the parameters around them too.

FSDP gathers a block's parameters around ``forward`` only. A method of the model's own class that
is called with a tensor (``model.encode(x)``) runs between the same hooks, unless it is called from
the forward itself.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


def wrap_methods(module: FSDPModule) -> None:
    """Let methods of the module's own class gather the parameters when called with a tensor."""
    for name in _own_methods(type(module)):
        plain = getattr(module, name)
        register_fsdp_forward_method(module, name)  # type: ignore[arg-type]
        gathering = getattr(module, name)
        setattr(module, name, _choosing(module, plain, gathering))


def _own_methods(kind: type) -> list[str]:
    """Return the public methods that the user's class adds to nn.Module and torch's classes."""
    names: dict[str, None] = {}
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "torch" or base is object:
            continue
        for name, value in vars(base).items():
            is_public = inspect.isfunction(value) and not name.startswith("_")
            if is_public and not hasattr(nn.Module, name):
                names[name] = None
    return list(names)


def _choosing(
    module: FSDPModule, plain: Callable[..., Any], gathering: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(plain)
    def method(*args: Any, **options: Any) -> Any:
        # within a forward of this module its parameters are whole
        is_inside = module._get_fsdp_state()._training_state == TrainingState.FORWARD
        has_tensor = any(isinstance(one, torch.Tensor) for one in (*args, *options.values()))
        return (gathering if has_tensor and not is_inside else plain)(*args, **options)

    return method
