"""Parts of each sample on the ranks of the axes depth, height and width, as a strategy.

Each rank computes with the whole model, whose states may be sharded over all ranks. It is called
with whole inputs (or with parts of ``world.part``), and computes with its part of each; gradients
are averaged over all ranks, which is the gradient of the whole sample by the rule of
``exchange.py``.
"""

import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...comm.group_device import device_of, gather_equal
from ...cost.layout import Layout
from ...record.hooks.phases import UncopiedHook
from ..comparison.model_comparison import (
    Division,
    Tensors,
    compare_model,
    tensors_in,
    unchanged,
)
from ..divided.divided_tensor import each_tensor, whole_outputs
from ..divided.module_names import note_names
from ..replicated.data_parallel import DataParallelModel, data_parallel
from ..sharded.strategy import FullySharded
from ..strategy.distributed_model import DistributedModel
from ..strategy.layout_arguments import needs_sharding
from ..strategy.parallel_strategy import DistributionRequest, ParallelStrategy
from . import convolution, layers, windows  # noqa: F401 - rules
from .exchange import summed
from .gathering import without_guard
from .partition import FROM_END
from .samples import AXES, check_same, spatial_groups, split_inputs
from .split_tensor import SpatialGroups, SplitTensor

SIDES = {1: 4096, 2: 128, 3: 32}  # of a corner, by the number of dims of positions
MIN_ROWS = 8  # of a corner, for each rank along a dim
MAX_SAMPLES = 2
MAX_ELEMENTS = 1 << 20  # of inputs that are compared whole, where a corner does not fit the model


class SpatialDivision(Division):
    """One forward of a model whose samples are divided.

    Args:
        args, options: Inputs of the model, whole on this rank.
    """

    subject = "the model on parts of samples"
    cause = (
        "Each layer by itself is right, so code of the model uses a part as if it were the whole "
        "sample. HINT: paceline.Layout(..., rules={'NAME': 'gather'}) with the layer's name"
    )

    def __init__(self, model: nn.Module, groups: SpatialGroups, args: Any, options: Any) -> None:
        self.model, self.groups, self.args, self.options = model, groups, args, options
        self.device = device_of(groups.all).type

    def pieces(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return gather_equal(tensor, self.groups.all)

    def divided(self) -> Any:
        self.groups.is_compared = True
        try:
            parts = split_inputs((self.args, self.options), self.groups)
            return whole_outputs(self.model.forward(*parts[0], **parts[1]))
        finally:
            self.groups.is_compared = False

    def whole(self) -> Any:
        return self.model.forward(*self.args, **self.options)

    def whole_gradients(self, gradients: Tensors) -> Tensors:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return [
            summed(torch.zeros_like(parameter) if own is None else own, self.groups.all)
            / dist.get_world_size(self.groups.all)
            for parameter, own in zip(trained, gradients, strict=bool(gradients))
        ]


def compare_parts(
    model: nn.Module, groups: SpatialGroups, args: Any, options: Any, takes_gradients: bool
) -> str:
    """Compare a model in its first forward; return a line about it. Collective.

    Args:
        takes_gradients: Whether gradients are compared too: they need whole parameters.

    Raises:
        DividedModelError: The model on parts differs from the one on whole samples.
    """
    inputs = (args, options)
    kind = "training" if model.training else "evaluation"
    small = _corners(inputs, groups)
    extents = [[tensor.shape for tensor in tensors_in(given)] for given in (inputs, small)]
    if extents[0] != extents[1] and not _accepts(model, groups, small):
        positions = max(tensor.numel() for tensor in tensors_in(inputs))
        if positions > MAX_ELEMENTS:
            return (
                f"parts of samples ({kind}): the model is not compared with the whole one, as it "
                "does not accept smaller samples"
            )
        small = whole_outputs(inputs)
    found = compare_model(model, SpatialDivision(model, groups, *small), takes_gradients)
    if found.difference is None:
        return f"parts of samples ({kind}): the model is not compared: {found.reason}"
    text = " and ".join(" x ".join(map(str, tensor.shape)) for tensor in tensors_in(small))
    return (
        f"parts of samples ({kind}): the whole model differs by {found.difference:.1g}, with "
        f"inputs of {text}; {found.seconds:.2f} s"
    )


def _corners(inputs: Any, groups: SpatialGroups) -> Any:
    """Return a corner of the first samples, whole on all ranks. Collective."""
    samples = {tensor.size(0) if tensor.dim() else 0 for tensor in tensors_in(inputs)}
    count = min(*samples, MAX_SAMPLES) if len(samples) == 1 else None
    ranks = {FROM_END[axis]: len(line.ranks) for axis, line in groups.lines.items()}

    def corner(tensor: torch.Tensor) -> torch.Tensor:
        dims = tensor.dim()
        index = [slice(count)] * min(dims, 1) + [slice(None)] * max(dims - 1, 0)
        if dims - 2 in SIDES:
            for dim in range(2, dims):
                rows = max(SIDES[dims - 2], MIN_ROWS * ranks.get(dims - dim, 1))
                index[dim] = slice(min(rows, tensor.size(dim)))
        found: torch.Tensor = whole_outputs(tensor[tuple(index)])
        return found

    return each_tensor(inputs, corner)


def _accepts(model: nn.Module, groups: SpatialGroups, inputs: Any) -> bool:
    """Return whether the model computes inputs of another size, on all ranks. Collective."""
    accepts = True
    with unchanged(model), torch.no_grad():
        try:
            model.forward(*inputs[0], **inputs[1])
        except Exception:  # of any layer or of the script
            accepts = False
    return all(groups.numbers(int(accepts)).values())


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

    def apply(self, model: DistributedModel, optimizer: Optimizer | None) -> DistributedModel:
        groups = spatial_groups(self.request.mesh)
        module = model.module
        note_names(module)
        for pattern, _ in self.request.layout.rule_pairs:
            for name, child in module.named_modules():
                if name and fnmatch.fnmatchcase(name, pattern):
                    child.register_forward_pre_hook(UncopiedHook(_gather_inputs), with_kwargs=True)
        return SpatialModel(self._with_states(model, optimizer), groups, self.request)

    def _with_states(
        self, model: DistributedModel, optimizer: Optimizer | None
    ) -> DistributedModel:
        """Return the model with replicas or shards on all ranks, which average its gradients."""
        mesh, device = self.request.mesh, self.request.device
        if self._sharding is not None:
            from ..sharded.fully_sharded import hook_parts  # FSDP takes a moment to import

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
        self.module.register_forward_hook(UncopiedHook(_plain_outputs))

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


def _plain_outputs(_: Any, args: Any, outputs: Any) -> Any:
    """Return outputs that the script may change in place, and save."""
    return each_tensor(outputs, without_guard)


def _gather_inputs(_: Any, args: Any, options: Any) -> Any:
    return whole_outputs(args), whole_outputs(options)
