"""The strategy of pipelines: cut the model into stages, and leave one on each rank."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from ...cost.layout import Layout
from ...cost.layout_memory import LayoutMemory, StepMemory
from ...optim.norms import GhostBatchNorm, GlobalBatchNorm
from ..strategy.distributed_model import DistributedModel
from ..strategy.parallel_strategy import DistributionRequest, ParallelStrategy
from .atoms import Atoms, tensors_by_name
from .cut_model import keep_parameters, keep_tensors
from .partition import Partition, divide, units_of_modules, units_of_trace
from .pipeline_model import PipelineModel
from .schedules import DEFAULT, MICRO_BATCHES_OF_STAGE, chunks_of, idle_share
from .trace import Skeleton

PIPELINE_OPTIONS = ("balance",)
_WHOLE_BATCH_NORMS = (nn.SyncBatchNorm, GlobalBatchNorm, GhostBatchNorm)


class Pipeline(ParallelStrategy):
    """Stages of a model on the ranks of the axis ``stage``, with replicas along ``data``."""

    axes = frozenset({"pp", "dp"})

    def __init__(self, request: DistributionRequest) -> None:
        super().__init__(request)
        layout = request.layout
        text = str(layout.without_options)
        for name in ("tp", "d", "h", "w"):
            if layout.extents[name] != 1:
                raise self._refused(f"pp together with {name}", layout)
        if layout.zero:
            raise self._refused(f"pp together with zero{layout.zero}", layout)
        if layout.offload is not None:
            raise self._refused(f"offload={layout.offload!r}", layout)
        if layout.recompute == "auto":
            raise self._refused("recompute='auto'", layout, "recompute='blocks'")
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
        if not any(True for _ in model.parameters()):
            raise ValueError(
                f"world.distribute: the {type(model).__name__} has no parameters to divide. HINT: "
                "layout='data'"
            )

    def apply(self, model: DistributedModel, optimizer: Optimizer | None) -> DistributedModel:
        module, mesh = model.module, self.request.mesh
        layout = self.request.layout.over(mesh.size)
        stages = layout.pp or 1
        example = self.request.example_inputs
        skeleton = Skeleton(module, Atoms.of(module), self.request.device)
        partition = self._partition(module, skeleton, layout, stages)
        rank = mesh.place["stage"]
        kept = {n for n, held in partition.held.items() if any(v % stages == rank for v in held)}
        self._say(module, layout, stages, partition)
        keep_tensors(module, kept)
        if optimizer is not None:
            keep_parameters(optimizer, module)
        return PipelineModel(
            *(module, model, mesh, layout, partition, skeleton, example is not None)
        )

    def _partition(
        self, module: nn.Module, skeleton: Skeleton, layout: Layout, stages: int
    ) -> Partition:
        example, virtual = (
            self.request.example_inputs,
            stages * chunks_of(layout.schedule or DEFAULT),
        )
        try:
            if example is None:
                units = units_of_modules(module, skeleton.atoms)
            else:
                units = units_of_trace(skeleton.trace(module, _as_micro_batch(example)), module)
            names = list(tensors_by_name(module))
            return divide(units, virtual, names, self.request.options.get("balance"))
        except ValueError as error:
            raise ValueError(
                f"world.distribute: layout={str(self.request.layout.without_options)!r}: {error}"
            ) from None

    def _say(self, module: nn.Module, layout: Layout, stages: int, partition: Partition) -> None:
        schedule = layout.schedule or DEFAULT
        count = layout.micro_batches or MICRO_BATCHES_OF_STAGE * stages
        of = "operations" if self.request.example_inputs is not None else "parameters' bytes"
        self.request.say(
            f"pipeline: {partition} of the {of}; {schedule}, {count} micro-batches, "
            f"{idle_share(schedule, stages, count):.0%} idle by the formula"
        )
        norms = [
            n for n, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
        ]
        if norms:
            self.request.say(
                f"pipeline: batch normalization ({norms[0]} and others) normalizes each "
                "micro-batch; running statistics are those of the whole batch".replace(
                    " and others", f" and {len(norms) - 1} more" if len(norms) > 1 else ""
                )
            )

    @classmethod
    def predict_memory(
        cls, step: StepMemory, layout: Layout, ranks: int, *, accumulate: int = 1
    ) -> LayoutMemory:
        raise ValueError(
            "the memory of pipeline stages can't be predicted yet. HINT: layout='zero3'"
        )


def _as_micro_batch(example: object) -> object:
    """Return example inputs as ``TrainingStep`` has them: a list is a tuple of arguments."""
    if isinstance(example, (torch.Tensor, tuple, Mapping)):
        return example
    return tuple(example) if isinstance(example, list) else (example,)
