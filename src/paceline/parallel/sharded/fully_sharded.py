"""ZeRO-1 to 3 by PyTorch's FSDP2 (``fully_shard``), which keeps the user's module.

Between steps a rank holds its shard of every parameter, of its gradient and of the optimizer's
states, as distributed tensors. FSDP gathers the whole parameters of a block before its forward, and
reduces and scatters its gradients in its backward.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.optim import Optimizer

from ...record.hooks.sharded.block_labels import whole_gradient
from ..blocks import gathered_blocks, names_in
from ..materialization import Materialization
from ..mesh import Mesh
from ..strategy.distributed_model import DistributedModel
from .block_usage import BlockUsage, groups_of
from .deferred_shards import compute_shards
from .errors import explain
from .forward_methods import wrap_methods
from .layouts import ShardingRequest
from .meshes import data_mesh
from .optimizer_parameters import replace_parameters
from .replication import BufferSync, broadcast_model


class FullyShardedModel(DistributedModel):
    """A model that ``fully_shard`` has sharded.

    Attributes:
        request: How it was to be sharded.
        mesh: The ranks: one dimension, or hosts and the ranks of each.
        shards: By the name of the parameter in the plain model, what the optimizer holds.
        blocks: Names of the modules that are gathered as a whole; "" for the model.
    """

    def __init__(
        self,
        inner: DistributedModel,
        request: ShardingRequest,
        mesh: DeviceMesh,
        group: dist.ProcessGroup,
    ) -> None:
        model = inner.module
        super().__init__(model, inner)
        assert isinstance(model, FSDPModule)
        self.request, self.mesh = request, mesh
        self._model = model
        self.shards = dict(model.named_parameters())
        self.blocks = [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]
        self._buffers = BufferSync(model, group)
        self._usage = BlockUsage(
            model,
            _states_of(model),
            {id(shard): name for name, shard in self.shards.items()},
            group,
        )
        self._is_syncing = True

    @property
    def is_distributed(self) -> bool:
        return True

    @property
    def is_sharded(self) -> bool:
        return True

    @property
    def has_collective_forward(self) -> bool:
        return True

    @property
    def holds_copied_shards(self) -> bool:
        return self.mesh.ndim > 1 or super().holds_copied_shards

    def parameters(self) -> dict[str, nn.Parameter]:
        return self.shards

    def block_of(self, name: str) -> str:
        return max((one for one in self.blocks if name.startswith(f"{one}.")), key=len, default="")

    def explain(self, error: BaseException) -> str | None:
        return explain(error) or super().explain(error)

    def set_gradient_sync(self, enabled: bool) -> None:
        if enabled == self._is_syncing:
            return
        self._is_syncing = enabled
        if not self.request.shards_accumulated_gradients:
            # whole parameters and gradients stay until the last backward of the group
            self._model.set_requires_gradient_sync(enabled)
            self._model.set_reshard_after_backward(enabled)
        elif self.mesh.ndim > 1:
            self._model.set_requires_all_reduce(enabled)

    def set_buffer_sync(self, enabled: bool) -> None:
        self._buffers.set(enabled)

    def discard_gradients(self) -> None:
        self._usage.discard_gradients()
        for shard in self.shards.values():
            shard.grad = None
        for group in self._groups():
            group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None

    def has_gradients(self) -> bool:
        if any(shard.grad is not None for shard in self.shards.values()):
            return True
        return any(
            group._partial_reduce_output is not None
            or any(whole_gradient(parameter) is not None for parameter in group.fsdp_params)
            for group in self._groups()
        )

    def has_run(self) -> bool:
        assert isinstance(self._model, FSDPModule)
        return self._model._get_fsdp_state()._is_root is not None

    def name_nonfinite(self, exchanged: torch.Tensor) -> list[str]:
        names = {id(shard): name for name, shard in self.shards.items()}
        for group in self._groups():
            if group._training_state != TrainingState.POST_BACKWARD:
                continue
            parameters = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
            sizes = [p.padded_sharded_param_size.numel() for p in parameters]
            rows = exchanged.view(self.mesh.size(self.mesh.ndim - 1), -1)
            # each row holds, one after the other, the shards of a rank
            well = [bool(part.isfinite().all()) for part in rows.split(sizes, dim=1)]
            found = [p for p, ok in zip(parameters, well, strict=True) if not ok]
            if found:
                return [names[id(p.sharded_param)] for p in reversed(found)]
        return super().name_nonfinite(exchanged)

    def _groups(self) -> list[FSDPParamGroup]:
        return _groups_of(self._model)


def _groups_of(model: nn.Module) -> list[FSDPParamGroup]:
    """Return FSDP's groups of parameters, one for each block."""
    return [group for state in _states_of(model) for group in groups_of(state)]


def _states_of(model: nn.Module) -> list[Any]:
    """Return FSDP's states of the model's blocks."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [module._get_fsdp_state() for module in modules]


def shard_model(
    inner: DistributedModel,
    optimizer: Optimizer | None,
    device: torch.device,
    request: ShardingRequest,
    ranks: Mesh,
    plan: Materialization | None = None,
) -> FullyShardedModel:
    """Shard a model over the data ranks, and replace the parameters of its optimizer. Collective.

    Args:
        plan: Of a deferred model; its shards are computed after it was sharded.

    Raises:
        ValueError: Hosts have different numbers of ranks, and shards are to stay in a host.
    """
    model = inner.module
    whole = dict(model.named_parameters(remove_duplicate=False))
    blocks = [*gathered_blocks(model, names_in(model, request.blocks)), ""]
    mesh, group = data_mesh(device, request.layout, ranks), ranks.copies_group
    broadcast_model(model, group)
    _shard_blocks(model, blocks, mesh, request)
    if plan is not None:
        each = [one for block in _groups_of(model) for one in block.fsdp_params]
        of = {id(one.sharded_param): one for one in each}
        divided = {name: of[id(parameter)] for name, parameter in model.named_parameters()}
        compute_shards(plan, divided, mesh.get_local_rank(mesh.ndim - 1), device, group)
    sharded = FullyShardedModel(inner, request, mesh, group)
    if optimizer is not None:
        after = dict(model.named_parameters(remove_duplicate=False))
        replace_parameters(optimizer, {id(p): after[name] for name, p in whole.items()})
    return sharded


def _shard_blocks(
    model: nn.Module, blocks: list[str], mesh: DeviceMesh, request: ShardingRequest
) -> None:
    """Apply ``fully_shard`` to each block, inner ones first, and to the model at last."""
    options: dict[str, Any] = dict(request.options)
    if request.layout.offload == "parameters":
        options["offload_policy"] = CPUOffloadPolicy()
    for name in blocks:
        module = model.get_submodule(name)
        # the model's own parameters are needed again when its backward begins
        reshards = request.reshards_after_forward and bool(name)
        fully_shard(module, mesh=mesh, reshard_after_forward=reshards, **options)
        assert isinstance(module, FSDPModule)
        wrap_methods(module)
    assert isinstance(model, FSDPModule)
    if mesh.device_type == "cpu":
        # gloo has no AVG, which FSDP would use
        model.set_force_sum_reduction_for_comms(True)
