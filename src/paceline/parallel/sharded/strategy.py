"""ZeRO-1 to 3 as a strategy: the states of the model are sharded over the data ranks."""

from torch import nn
from torch.optim import Optimizer

from ...cost.layout import Layout
from ...knobs.process import return_freed_memory
from ..blocks import nbytes_of
from ..materialization import Materialization
from ..memory_budget import available_bytes
from ..strategy.distributed_model import DistributedModel
from ..strategy.parallel_strategy import DistributionRequest, ParallelStrategy
from .deferred_shards import plan_shards
from .layouts import check_hooks, check_sharding, parse_request

AMPLE_SHARE = 4  # of the whole model's bytes; with less memory, freed blocks are returned at once


class FullySharded(ParallelStrategy):
    """Optimizer states, gradients and parameters in shards on the data ranks."""

    axes = frozenset({"dp"})

    def __init__(self, request: DistributionRequest) -> None:
        super().__init__(request)
        device = request.device.type
        self._sharding = parse_request(request.layout, request.blocks, device, request.options)
        self._plan: Materialization | None = None

    @classmethod
    def divides(cls, layout: Layout) -> bool:
        return bool(layout.zero)

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        check_sharding(model, optimizer, self._sharding)

    def defers(self, model: nn.Module) -> bool:
        self._plan = plan_shards(model, self.request.mesh.copies_group)
        return self._plan is not None

    def apply(self, model: DistributedModel, optimizer: Optimizer | None) -> DistributedModel:
        from .fully_sharded import shard_model  # FSDP takes a moment to import

        device, mesh = self.request.device, self.request.mesh
        check_hooks(model.module, self._sharding)  # of strategies that were applied before
        # FSDP allocates whole blocks, and between them shards that stay. On a CPU glibc would keep
        # the gaps: up to the size of the whole model, once for parameters and once for gradients.
        ample = AMPLE_SHARE * nbytes_of(model.module)
        if device.type == "cpu" and available_bytes(device) < ample:
            return_freed_memory()
        plan, self._plan = self._plan, None  # it holds the recording of the deferred model
        return shard_model(model, optimizer, device, self._sharding, mesh, plan)
