"""Place a model on the device of its rank, under autocast if that is asked for."""

from typing import Any

import torch
from torch import nn

from .deferred import is_deferred


class Autocast:
    """A module's ``forward`` under autocast, with floating-point outputs in float32."""

    def __init__(self, forward: Any, device: str, dtype: torch.dtype) -> None:
        self.forward, self.device, self.dtype = forward, device, dtype

    def __call__(self, *args: Any, **options: Any) -> Any:
        with torch.autocast(self.device, dtype=self.dtype):
            return _as_float32(self.forward(*args, **options))


def _as_float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)({key: _as_float32(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_as_float32(item) for item in value)
    return value


def check_accumulate(accumulate: int) -> None:
    """Raise ValueError for a number of batches that can't be accumulated."""
    if accumulate < 1:
        reason = f"accumulate must be at least 1; this is {accumulate}. HINT: accumulate=1"
        raise ValueError(f"world.distribute: {reason}")


def place_model(
    model: nn.Module, device: torch.device, autocast_dtype: torch.dtype | None
) -> nn.Module:
    """Move ``model`` to the device, and run its forward under autocast if there is a dtype.

    Tensors of a deferred model stay on the device meta.
    """
    if is_deferred(model):
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.to(device)
    else:
        model.to(device)
    if autocast_dtype is not None:
        model.forward = Autocast(model.forward, device.type, autocast_dtype)
    return model


def empty_as(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the same shape, strides, dtype and kind. Without data in a fake mode."""
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad and tensor.is_leaf)
