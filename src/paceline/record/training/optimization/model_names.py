"""The user's module inside of wrappers, and the names of its parameters."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Parts of parameter names that wrappers add.
_ADDED_NAMES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrapped(module: nn.Module) -> tuple[nn.Module, Any]:
    """Return the module inside of wrappers, and the DistributedDataParallel among them."""
    ddp = None
    while True:
        if isinstance(module, DistributedDataParallel):
            ddp, module = module, module.module
        elif type(module).__name__ == "OptimizedModule":
            module = module._orig_mod  # type: ignore[assignment]
        elif type(module).__name__ == "DataParallel":
            module = module.module  # type: ignore[assignment]
        else:
            return module, ddp


def named_parameters(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a module with their names without those of wrappers."""
    inside = {
        name for name, one in root.named_modules() if isinstance(one, DistributedDataParallel)
    }
    for name, parameter in root.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            continue
        for prefix in inside:
            if name.startswith(f"{prefix}.module."):
                name = f"{prefix}.{name.removeprefix(f'{prefix}.module.')}"
        yield clean_name(name), parameter


def clean_name(name: str) -> str:
    """Return the name of a parameter without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _ADDED_NAMES)


def is_own_batch_norm(module: nn.Module) -> bool:
    """Return whether a layer normalizes by statistics of the batch of one rank."""
    kind = nn.modules.batchnorm._BatchNorm
    is_global = isinstance(module, nn.SyncBatchNorm) or hasattr(module, "has_global_statistics")
    return isinstance(module, kind) and not is_global
