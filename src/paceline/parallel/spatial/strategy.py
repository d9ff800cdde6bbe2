"""Parts of each sample on the ranks of the axes depth, height and width, as a strategy.

Each rank computes with the whole model, whose states may be sharded over all ranks. It is called
with whole inputs (or with parts of ``world.part``), and computes with its part of each; gradients
are averaged over all ranks, which is the gradient of the whole sample by the rule of
``exchange.py``.
"""

import fnmatch
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...cost.layout import Layout
from ...cost.layout_memory import LayoutMemory, StepMemory
from ...record.hooks.phases import UncopiedHook
from ..divided.divided_tensor import whole_outputs
from ..divided.module_names import note_names
from ..replicated.data_parallel import DataParallelModel, data_parallel
from ..sharded.strategy import FullySharded
from ..strategy.distributed_model import DistributedModel
from ..strategy.layout_arguments import needs_sharding
from ..strategy.parallel_strategy import DistributionRequest, ParallelStrategy
from . import all_positions, convolution, losses, norms, products, resampling, shapes  # noqa: F401 - rules
from .model_division import compare_parts
from .samples import AXES, check_same, spatial_groups, split_inputs
from .split_tensor import SpatialGroups, SplitTensor

GATHER = "gather"  # the kind of a rule


class SpatialParallel(ParallelStrategy):
    """Parts of each sample on ranks; a replica of the model on each rank, or a shard of it."""

    axes = frozenset({"d", "h", "w", "dp"})

    def __init__(self, request: DistributionRequest) -> None:
        super().__init__(request)
        layout = request.layout
        text = str(layout)
        for other in ("tp", "pp"):
            if layout.extents[other] != 1:
                raise ValueError(
                    f"world.distribute: layout={text!r}: {other} together with parts of a sample "
                    "is not implemented yet. HINT: d, h, w and dp, with zero1 to zero3"
                )
        self._sharding = FullySharded(request) if layout.zero else None
        if request.blocks is not None and not layout.zero:
            raise needs_sharding("blocks", request.blocks, layout)
        if request.options.get("find_unused_parameters"):
            raise ValueError(
                f"world.distribute: layout={text!r} does not support find_unused_parameters=True. "
                "HINT: requires_grad_(False) for parameters that are never used"
            )
        for pattern, kind in layout.rule_pairs:
            if kind != GATHER:
                raise ValueError(
                    f"world.distribute: layout={text!r}: the rule {pattern!r} has the kind "
                    f"{kind!r}, which divides operators and not samples. HINT: {GATHER!r}"
                )

    @classmethod
    def divides(cls, layout: Layout) -> bool:
        return any(layout.extents[axis] != 1 for axis in AXES)

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        names = [name for name, _ in model.named_modules() if name]
        for pattern, _ in self.request.layout.rule_pairs:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                from difflib import get_close_matches

                near = get_close_matches(pattern, names, n=1, cutoff=0.0)
                hint = f"HINT: {near[0]}" if near else "HINT: leave the rule out"
                raise ValueError(f"world.distribute: the rule {pattern!r} matches no layer. {hint}")
        if self._sharding is not None:
            self._sharding.check(model, optimizer)

    @classmethod
    def predict_memory(
        cls, step: StepMemory, layout: Layout, ranks: int, *, accumulate: int = 1
    ) -> LayoutMemory:
        raise ValueError(
            f"the memory of layout={str(layout)!r} can't be predicted yet. HINT: activations are "
            "divided, parameters are not"
        )

    def apply(self, model: DistributedModel, optimizer: Optimizer | None) -> DistributedModel:
        groups = spatial_groups(self.request.mesh)
        module = model.module
        note_names(module)
        for pattern, _ in self.request.layout.rule_pairs:
            for name, one in module.named_modules():
                if name and fnmatch.fnmatchcase(name, pattern):
                    one.register_forward_pre_hook(UncopiedHook(_gather_inputs), with_kwargs=True)
        return SpatialModel(self._with_states(model, optimizer), groups, self.request)

    def _with_states(
        self, model: DistributedModel, optimizer: Optimizer | None
    ) -> DistributedModel:
        """Return the model with replicas or shards on all ranks, which average its gradients."""
        mesh, device = self.request.mesh, self.request.device
        if self._sharding is not None:
            from ..sharded.parts_of_tensors import hook_parts  # FSDP takes a moment to import

            sharded = self._sharding.apply(model, optimizer)
            hook_parts(sharded.module, SplitTensor)
            return sharded
        replica = data_parallel(model.module, device, mesh, **self.request.options)
        return model if replica is model.module else DataParallelModel(replica, model)


class SpatialModel(DistributedModel):
    """A model that computes with this rank's part of each sample."""

    def __init__(
        self, inner: DistributedModel, groups: SpatialGroups, request: DistributionRequest
    ) -> None:
        super().__init__(inner.called, inner)
        self.groups = groups
        groups.say = request.say
        self._request = request
        self._compared: set[bool] = set()  # training, evaluation
        self.module.register_forward_pre_hook(UncopiedHook(self._split_inputs), with_kwargs=True)

    @property
    def called(self) -> nn.Module:
        return self.module

    @property
    def has_collective_forward(self) -> bool:
        return True

    def explain(self, error: BaseException) -> str | None:
        text = super().explain(error)
        if text and "find_unused_parameters" in text:  # which this layout refuses
            cause = text.partition(" HINT:")[0]
            return f"{cause} HINT: requires_grad_(False) for parameters that are never used"
        return text

    def _split_inputs(self, module: nn.Module, args: Any, options: Any) -> Any:
        check_same((args, options), self.groups)
        if self._request.compare and module.training not in self._compared:
            self._compared.add(module.training)
            takes_gradients = not self._request.layout.zero
            line = compare_parts(module, self.groups, args, options, takes_gradients)
            self._request.say(line)
        return split_inputs(args, self.groups), split_inputs(options, self.groups)


def _gather_inputs(_: Any, args: Any, options: Any) -> Any:
    return whole_outputs(args), whole_outputs(options)
