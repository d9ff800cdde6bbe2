"""Data parallelism by DistributedDataParallel, and what all layouts have in common."""

import re
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from ..optim.gradients import has_gradients
from .deferred import is_deferred
from .replica import FixedBuckets, replicas
from .sharded.registry import sharded_of
from .sharded.replication import BROADCAST_BYTES


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


def data_parallel(model: nn.Module, device: torch.device, **options: Any) -> nn.Module:
    """Wrap ``model`` in DDP: rank 0's parameters and buffers on all ranks, gradients averaged.

    options: of DDP. A model without trainable parameters is returned unchanged.

    Raises:
        ValueError: A parameter has no shape yet, or the model is distributed already.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"world.distribute: the parameter {name} has no shape yet. HINT: run one forward "
                "before world.distribute"
            )
    if is_distributed(model):
        raise ValueError(
            "world.distribute: the model is distributed already. HINT: create the optimizer "
            "first, then model, optimizer = world.distribute(model, optimizer) once"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    options.setdefault("gradient_as_bucket_view", True)
    if device.type == "cuda":
        options.setdefault("device_ids", [device.index])
    return FixedBuckets(model, **options)


def explain_ddp_error(error: BaseException) -> str | None:
    """Return DDP's advice in terms of ``world.distribute``; None for any other error.

    DDP's own text stays in scripts that do not use ``world.distribute``.
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or not replicas:
        return None
    if "Expected to mark a variable ready only once" in text:
        return (
            "a parameter got its gradient twice in one backward. HINT: use_reentrant=False in "
            "torch.utils.checkpoint; or world.distribute(model, optimizer, static_graph=True) "
            "if every step uses the same parameters in the same way"
        )
    if "Expected to have finished reduction in the prior iteration" not in text:
        return None
    indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
    names = _parameter_names([int(index) for index in indices[1].split()] if indices else [])
    return (
        f"the last loss did not use all parameters of the model{names}, so ranks wait for their "
        "gradients. HINT: world.distribute(model, optimizer, find_unused_parameters=True), or "
        "requires_grad_(False) before world.distribute for parameters that are never used"
    )


def _parameter_names(indices: list[int]) -> str:
    """Return the names of parameters by their numbers in the reducer; "" where not known."""
    if len(replicas) != 1 or not indices:
        return ""
    (replica,) = replicas
    # the same order as _build_params_for_reducer
    ignored = replica.parameters_to_ignore
    trained = (name for name, p in replica.module.named_parameters() if p.requires_grad)
    names = [name for name in trained if name not in ignored]
    if not replica.find_unused_parameters:
        indices = [len(names) - 1 - index for index in indices]
    found = [name for i, name in enumerate(names) if i in indices]
    if not found:
        return ""
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return f" ({', '.join(found[:4])}{more})"


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Set whether the next forward and backward synchronize gradients (as DDP's ``no_sync``)."""
    sharded = sharded_of(model)
    if sharded is not None:
        sharded.set_gradient_sync(enabled)
    # Set only on a change: a module's __setattr__ is slow.
    elif isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync != enabled:
        model.require_backward_grad_sync = enabled


def set_buffer_sync(model: nn.Module, enabled: bool) -> None:
    """Set whether forwards broadcast rank 0's buffers first.

    Disable it where ranks run different numbers of forwards. Disabling broadcasts them one last
    time, on all ranks together; with ``broadcast_buffers=False`` only running statistics, so that
    all ranks evaluate the same model.
    """
    sharded = sharded_of(model)
    if sharded is not None:
        sharded.set_buffer_sync(enabled)
    elif isinstance(model, DistributedDataParallel):
        if not enabled and model.will_sync_module_buffers():
            model._sync_buffers()
        elif not enabled and not model.broadcast_buffers:
            _share_statistics(model)
        model.require_forward_param_sync = enabled


def _share_statistics(model: DistributedDataParallel) -> None:
    """Broadcast rank 0's running statistics of normalization layers."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    statistics = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
    if statistics:
        _broadcast_coalesced(model.process_group, statistics, BROADCAST_BYTES, 0)


def is_distributed(model: nn.Module) -> bool:
    """Return whether a model's gradients are exchanged between ranks."""
    return isinstance(model, DistributedDataParallel) or sharded_of(model) is not None


def has_model_gradients(model: nn.Module) -> bool:
    """Return whether a model has gradients that wait for a step."""
    sharded = sharded_of(model)
    if sharded is not None:
        return sharded.has_gradients()
    return has_gradients(model.parameters())


def discard_gradients(model: nn.Module) -> None:
    """Discard a model's gradients, also those that no exchange has taken yet."""
    sharded = sharded_of(model)
    if sharded is not None:
        sharded.discard_gradients()
    else:
        model.zero_grad(set_to_none=True)
