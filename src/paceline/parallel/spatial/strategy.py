"""Parts of each sample on the ranks of the axes depth, height and width, as a strategy.

The model stays whole on each rank. It is called with whole inputs (or with parts of
``world.part``), and computes with its part of each; gradients are averaged over all ranks, which
is the gradient of the whole sample by the rule of ``exchange.py``.
"""

import fnmatch
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...cost.layout import AXIS_WORDS, Layout
from ...cost.layout_memory import LayoutMemory, StepMemory
from ...plurals import counted
from ...record.hooks.phases import UncopiedHook
from ..mesh import Mesh
from ..replicated.data_parallel import DataParallelModel, data_parallel
from ..strategy.distributed_model import DistributedModel
from ..strategy.layout_arguments import needs_sharding
from ..strategy.parallel_strategy import DistributionRequest, ParallelStrategy
from . import losses, norms, pointwise, resampling, shapes, windows  # noqa: F401 - the handlers
from .exchange import Line
from .partition import Partition
from .split_tensor import SpatialGroups, SplitTensor, name_modules, split

AXES = ("d", "h", "w")
FROM_END = {"depth": 3, "height": 2, "width": 1}  # place of the dim
GATHER = "gather"  # the kind of a rule


class SpatialParallel(ParallelStrategy):
    """Parts of each sample on ranks; a replica of the model on each rank."""

    axes = frozenset({"d", "h", "w", "dp"})

    def __init__(self, request: DistributionRequest) -> None:
        super().__init__(request)
        layout = request.layout
        text = str(layout)
        if layout.zero or layout.tp != 1 or layout.pp != 1:
            others = [f"zero{layout.zero}"] if layout.zero else []
            others += [one for one in ("tp", "pp") if layout.extents[one] != 1]
            raise ValueError(
                f"world.distribute: layout={text!r}: {others[0]} together with parts of a sample "
                "is not implemented yet. HINT: d, h, w and dp only"
            )
        if request.blocks is not None:
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

    @classmethod
    def predict_memory(
        cls, step: StepMemory, layout: Layout, ranks: int, *, accumulate: int = 1
    ) -> LayoutMemory:
        raise ValueError(
            f"the memory of layout={str(layout)!r} can't be predicted yet. HINT: activations are "
            "divided, parameters are not"
        )

    def apply(self, model: DistributedModel, optimizer: Optimizer | None) -> DistributedModel:
        mesh, device = self.request.mesh, self.request.device
        groups = spatial_groups(mesh)
        module = model.module
        name_modules(module)
        for pattern, _ in self.request.layout.rule_pairs:
            for name, one in module.named_modules():
                if name and fnmatch.fnmatchcase(name, pattern):
                    one.register_forward_pre_hook(UncopiedHook(_gather_inputs), with_kwargs=True)
        replica = data_parallel(module, device, None, **self.request.options)
        inner = DataParallelModel(replica, model) if replica is not module else model
        return SpatialModel(inner, groups)


class SpatialModel(DistributedModel):
    """A model that computes with this rank's part of each sample."""

    def __init__(self, inner: DistributedModel, groups: SpatialGroups) -> None:
        super().__init__(inner.called, inner)
        self.groups = groups
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

    def _split_inputs(self, _: Any, args: Any, options: Any) -> Any:
        return split_inputs(args, self.groups), split_inputs(options, self.groups)


def spatial_groups(mesh: Mesh) -> SpatialGroups:
    """Return the ranks along each divided axis, and groups of all combinations. Collective."""
    axes = [AXIS_WORDS[one] for one in AXES if AXIS_WORDS[one] in mesh.shape]
    lines = {}
    for axis in axes:
        ranks = tuple(mesh.ranks_along((axis,)))
        lines[axis] = Line(mesh.group(axis), ranks, ranks.index(mesh.rank))
    groups = {
        frozenset(some): mesh.group(*some)
        for count in range(1, len(axes) + 1)
        for some in combinations(axes, count)
    }
    return SpatialGroups(lines, groups)


def split_inputs(value: Any, groups: SpatialGroups) -> Any:
    """Return inputs of a model with this rank's part of each tensor that has positions."""
    return _each_tensor(value, lambda tensor: split_positions(tensor, groups))


def split_positions(tensor: torch.Tensor, groups: SpatialGroups) -> torch.Tensor:
    """Return this rank's part of a tensor (samples, channels, [[depth,] height,] width).

    Tensors of two dims or fewer have no positions and stay whole.

    Raises:
        ValueError: The tensor lacks a divided dim, has fewer rows than ranks, or requires a
            gradient.
    """
    if isinstance(tensor, SplitTensor) or tensor.dim() <= 2:
        return tensor
    parts = even_parts(tensor.shape, groups)
    if tensor.requires_grad:
        raise ValueError(
            f"an input of shape {tuple(tensor.shape)} requires a gradient, which is not "
            "implemented for samples that are divided over ranks. HINT: requires_grad_(False)"
        )
    return split(tensor, parts, groups)


def even_parts(shape: Sequence[int], groups: SpatialGroups) -> dict[int, Partition]:
    """Return the partitions of samples [samples, channels, [[depth,] height,] width].

    Raises:
        ValueError: The shape lacks a divided dim, or has fewer rows than ranks.
    """
    parts = {}
    for axis, line in groups.lines.items():
        dim = len(shape) - FROM_END[axis]
        if dim < 2:
            raise ValueError(
                f"an input of shape {tuple(shape)} has no {axis}, along which samples are divided: "
                "its dims are samples, channels, and then depth, height and width. HINT: layout w "
                "for sequences, h and w for images, d, h and w for volumes"
            )
        if shape[dim] < len(line.ranks):
            raise ValueError(
                f"an input of shape {tuple(shape)} has {counted(shape[dim], 'row')} along the "
                f"{axis} for {len(line.ranks)} ranks. HINT: layout {axis[0]}{shape[dim]}, or "
                "larger samples"
            )
        parts[dim] = Partition.even(axis, shape[dim], len(line.ranks))
    return parts


def slices_of(shape: Sequence[int], groups: SpatialGroups) -> tuple[slice, ...]:
    """Return this rank's part of an array [..., [[depth,] height,] width]."""
    missing = max(2 + max(FROM_END[axis] for axis in groups.lines) - len(shape), 0)
    parts = even_parts((1,) * missing + tuple(shape), groups) if missing <= 2 else {}
    if not parts or any(dim < missing for dim in parts):
        even_parts(shape, groups)  # its error
    found = [slice(None)] * len(shape)
    for dim, partition in parts.items():
        found[dim - missing] = slice(*partition.part(groups.lines[partition.axis].place))
    return tuple(found)


def from_part(tensor: torch.Tensor, shape: Sequence[int], groups: SpatialGroups) -> SplitTensor:
    """Return this rank's part of samples of a shape as a divided tensor."""
    parts, expected = even_parts(shape, groups), list(shape)
    for dim, partition in parts.items():
        first, end = partition.part(groups.lines[partition.axis].place)
        expected[dim] = end - first
    if list(tensor.shape) != expected:
        raise ValueError(
            f"world.part: this rank's part of {tuple(shape)} has shape {tuple(expected)}, and the "
            f"tensor {tuple(tensor.shape)}. HINT: array[world.slices(array.shape)]"
        )
    return SplitTensor(tensor, parts, groups)


def _gather_inputs(_: Any, args: Any, options: Any) -> Any:
    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.whole() if isinstance(tensor, SplitTensor) else tensor

    return _each_tensor(args, whole), _each_tensor(options, whole)


def _each_tensor(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _each_tensor(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_each_tensor(item, change) for item in value)
    return value


def whole(value: Any) -> Any:
    """Return outputs of a model as whole tensors on all ranks of a sample. Collective."""
    return _gather_inputs(None, (value,), {})[0][0]
