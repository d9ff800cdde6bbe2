"""Data parallel: DDP, with buckets whose layout is the same from the first step on.

DDP re-sorts its buckets after its first step, by the order in which gradients came. With
three or more ranks gloo's ring sums an element in an order that depends on its place in the
bucket, so a run that was resumed (and re-sorts later) would differ in the last bit from one
that never stopped. ``FixedBuckets`` gives DDP its final layout at once: parameters in reverse
order of registration, which is the order that backward takes through most models.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class FixedBuckets(DistributedDataParallel):
    """DDP whose buckets are final from the start."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.settle()

    def settle(self) -> None:
        """Of a reducer that has just been made."""
        if not self.find_unused_parameters:  # then DDP never re-sorts
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if self.find_unused_parameters:  # then DDP itself begins with the last ones, and stays so
            return parameters, sparse
        return parameters[::-1], sparse[::-1]


class Autocast:
    """A module's ``forward`` under autocast, its floating outputs given back in float32."""

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


def data_parallel(model: nn.Module, device: torch.device, **options: Any) -> nn.Module:
    """``model`` as DDP: rank 0's parameters and buffers on all ranks, gradients averaged.

    Options are DDP's own. A model without parameters to train stays as it is.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    options.setdefault("gradient_as_bucket_view", True)
    if device.type == "cuda":
        options.setdefault("device_ids", [device.index])
    return FixedBuckets(model, **options)


def set_exchange(model: nn.Module, on: bool) -> None:
    """Whether the next forward and backward exchange gradients (DDP's ``no_sync``, unnested)."""
    # Set on change only: a module's __setattr__ is slow.
    if isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync != on:
        model.require_backward_grad_sync = on


def set_buffer_exchange(model: nn.Module, on: bool) -> None:
    """Whether forwards broadcast rank 0's buffers first; off where ranks' forwards differ in
    number. Turning it off broadcasts them one last time, on all ranks together."""
    if isinstance(model, DistributedDataParallel):
        if not on and model.will_sync_module_buffers():
            model._sync_buffers()
        model.require_forward_param_sync = on


def plain(model: nn.Module) -> nn.Module:
    """The user's module, whatever wraps it."""
    return model.module if isinstance(model, DistributedDataParallel) else model
