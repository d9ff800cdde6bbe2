"""Data parallelism by DistributedDataParallel: each data rank has a replica of the model."""

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from ...cost.layout import Layout
from ...optim.local_sgd import LocalSGD, local_sgd_of
from ..mesh import Mesh
from ..strategy.distributed_model import DistributedModel
from ..strategy.layout_arguments import needs_sharding
from ..strategy.parallel_strategy import DistributionRequest, ParallelStrategy
from .replica import BROADCAST_BYTES, FixedBuckets, replicas


class DataParallel(ParallelStrategy):
    """A replica of the model on each data rank."""

    axes = frozenset({"dp"})

    def __init__(self, request: DistributionRequest) -> None:
        super().__init__(request)
        if request.blocks is not None:
            raise needs_sharding("blocks", request.blocks, request.layout)

    @classmethod
    def divides(cls, layout: Layout) -> bool:
        return not layout.zero

    def apply(self, model: DistributedModel, optimizer: Optimizer | None) -> DistributedModel:
        mesh, device = self.request.mesh, self.request.device
        if mesh.data_size == 1 and mesh.is_divided:
            return model
        module = data_parallel(model.module, device, mesh, **self.request.options)
        if module is model.module:
            return model
        return DataParallelModel(module, model)


class DataParallelModel(DistributedModel):
    """A model of which each data rank has a replica."""

    module: FixedBuckets

    @property
    def is_distributed(self) -> bool:
        return True

    @property
    def ignored_parameters(self) -> Collection[str]:
        found: Collection[str] = self.module.parameters_to_ignore
        return found

    @property
    def local_sgd(self) -> LocalSGD | None:
        return local_sgd_of(self.module)

    def set_gradient_sync(self, enabled: bool) -> None:
        super().set_gradient_sync(enabled)
        # Set only on a change: a module's __setattr__ is slow.
        if self.module.require_backward_grad_sync != enabled:
            self.module.require_backward_grad_sync = enabled

    def set_buffer_sync(self, enabled: bool) -> None:
        super().set_buffer_sync(enabled)
        if not enabled and self.module.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            self.module._sync_buffers()  # type: ignore[no-untyped-call]
        elif not enabled and not self.module.broadcast_buffers:
            _share_statistics(self.module)
        self.module.require_forward_param_sync = enabled

    def discard_gradients(self) -> None:
        self.module.zero_grad(set_to_none=True)

    def explain(self, error: BaseException) -> str | None:
        return explain_ddp_error(error) or super().explain(error)


def _share_statistics(model: DistributedDataParallel) -> None:
    """Broadcast the first data rank's running statistics of normalization layers.

    So all ranks evaluate the same model also with ``broadcast_buffers=False``.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    statistics = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
    if statistics:
        _broadcast_coalesced(model.process_group, statistics, BROADCAST_BYTES, 0)


def data_parallel(
    model: nn.Module, device: torch.device, mesh: Mesh | None = None, **options: Any
) -> nn.Module:
    """Wrap ``model`` in DDP: the first rank's parameters and buffers on all, gradients averaged.

    A model without trainable parameters is returned unchanged.

    Args:
        mesh: Its ranks with this rank's part of the model have replicas; None: all ranks.
        options: Of DDP.

    Raises:
        ValueError: A parameter has no shape yet, or the model is distributed already.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"world.distribute: the parameter {name} has no shape yet. HINT: run one forward "
                "before world.distribute"
            )
    kinds = {kind.__name__ for kind in type(model).__mro__}
    if isinstance(model, DistributedDataParallel) or "FSDPModule" in kinds:
        raise ValueError(
            "world.distribute: the model is distributed already. HINT: create the optimizer "
            "first, then model, optimizer = world.distribute(model, optimizer) once"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    options.setdefault("gradient_as_bucket_view", True)
    if device.type == "cuda":
        options.setdefault("device_ids", [device.index])
    if mesh is not None and mesh.is_divided:
        options.setdefault("process_group", mesh.copies_group)
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
