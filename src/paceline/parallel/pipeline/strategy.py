"""The strategy of pipelines: cut the model into stages, and leave one on each rank."""

from torch import nn
from torch.optim import Optimizer

from ...cost.layout import Layout
from ...optim.norms import GhostBatchNorm, GlobalBatchNorm
from ..sharded.layouts import ShardingRequest, check_sharding
from ..strategy.distributed_model import DistributedModel
from ..strategy.parallel_strategy import DistributionRequest, ParallelStrategy
from ..tensor.strategy import TensorParallel
from .stage_runner import check_hooks

PIPELINE_OPTIONS = ("balance",)
_WHOLE_BATCH_NORMS = (nn.SyncBatchNorm, GlobalBatchNorm, GhostBatchNorm)


class Pipeline(ParallelStrategy):
    """Stages of a model on the ranks of the axis ``stage``, with replicas along ``data``.

    Where ranks along ``tensor`` share a stage, its layers are divided over them.
    """

    axes = frozenset({"pp", "dp", "tp"})

    def __init__(self, request: DistributionRequest) -> None:
        super().__init__(request)
        layout = request.layout
        text = str(layout.without_options)
        for name in ("d", "h", "w"):
            if layout.extents[name] != 1:
                raise self._refused(f"pp together with {name}", layout)
        if layout.zero and layout.shards not in (None, "job"):
            hint = f"zero{layout.zero}, over all replicas of each stage"
            raise self._refused(f"pp together with shards on {layout.shards}", layout, hint)
        if layout.offload is not None:
            raise self._refused(f"offload={layout.offload!r}", layout)
        if layout.recompute == "auto":
            raise self._refused("recompute='auto'", layout, "recompute='blocks'")
        if layout.recompute is not None and layout.schedule == "zero-bubble":
            raise self._refused("recompute with zero-bubble", layout, "schedule=1f1b")
        if request.blocks is not None:
            raise ValueError(
                f"world.distribute: blocks needs a layout that shards, and layout is {text!r}. "
                "HINT: balance=['NAME'], the modules with which the later stages begin"
            )
        unknown = [name for name in request.options if name not in PIPELINE_OPTIONS]
        if unknown:
            raise ValueError(
                f"world.distribute: layout={text!r} has no option {unknown[0]!r}. HINT: "
                "balance=['NAME'], or leave it out"
            )

        self._tensor = TensorParallel(request) if layout.tp != 1 else None
        if self._tensor is not None and layout.schedule == "zero-bubble":
            raise self._refused("tp with zero-bubble", layout, "schedule=1f1b")

    def _refused(self, what: str, layout: Layout, hint: str = "") -> ValueError:
        stages = f"pp{layout.pp}" if layout.pp else "pp"
        return ValueError(
            f"world.distribute: layout={str(layout)!r}: {what} is not implemented yet. HINT: "
            f"{hint or f'layout={stages!r}, which has replicas on the other ranks'}"
        )

    @classmethod
    def divides(cls, layout: Layout) -> bool:
        return layout.pp != 1

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        for name, module in model.named_modules():
            if isinstance(module, _WHOLE_BATCH_NORMS):
                raise ValueError(
                    f"world.distribute: layout={str(self.request.layout)!r}: {name} is a "
                    f"{type(module).__name__}, which normalizes with other samples than those of "
                    "a micro-batch. HINT: nn.BatchNorm2d with norm='local', or norm='group:8'"
                )
        if self._tensor is not None:
            self._tensor.check(model, optimizer)
        check_hooks(model)
        if self.request.layout.zero > 1:
            check_sharding(model, optimizer, ShardingRequest(self.request.layout))
        if not any(True for _ in model.parameters()):
            raise ValueError(
                f"world.distribute: the {type(model).__name__} has no parameters to divide. HINT: "
                "layout='data'"
            )

    def apply(self, model: DistributedModel, optimizer: Optimizer | None) -> DistributedModel:
        from .divide_model import divide_model  # it imports much that other layouts do not need

        return divide_model(model, optimizer, self.request, self._tensor)
