"""The user's module inside of wrappers, its parameters' names, and this rank's parts of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Shards


@dataclass(frozen=True)
class Shard:
    """The values that this rank holds.

    Attributes:
        values: The values.
        offset: Position of the first of them in the flattened whole tensor.
        shape: Shape of the whole tensor.
    """

    values: torch.Tensor
    offset: int
    shape: list[int]


def shard_of(tensor: torch.Tensor) -> Shard | str:
    """Return this rank's shard of a tensor; the reason if it is not contiguous in the whole."""
    if tensor.is_meta:
        return "without values, on the device meta"
    if not hasattr(tensor, "placements"):  # no DTensor
        if tensor.is_sparse:
            tensor = tensor.to_dense()
        if tensor.layout != torch.strided:
            return f"of layout {tensor.layout}"
        return Shard(tensor.detach(), 0, list(tensor.shape))
    whole: Any = tensor
    from torch.distributed.tensor import Shard as Sharded
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded = [one for one in whole.placements if isinstance(one, Sharded)]
    if any(one.is_partial() for one in whole.placements):
        return "a partial sum of ranks"
    if len(sharded) > 1 or any(one.dim != 0 for one in sharded):
        return "sharded in another dimension than the first"
    _, offsets = compute_local_shape_and_global_offset(
        whole.shape, whole.device_mesh, whole.placements
    )
    row = 1
    for size in whole.shape[1:]:
        row *= size
    first = offsets[0] if offsets else 0
    return Shard(whole._local_tensor.detach(), first * row, list(whole.shape))


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
