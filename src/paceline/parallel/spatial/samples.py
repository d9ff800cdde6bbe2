"""Samples in parts: inputs of a model, and arrays that no rank reads whole.

A tensor of samples has the dims (samples, channels, [[depth,] height,] width).
"""

import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

import torch

from ...cost.layout import AXIS_WORDS
from ...plurals import counted, named_ranks
from ..comparison.model_comparison import tensors_in
from ..divided.divided_tensor import each_tensor
from ..mesh import Mesh
from .exchange import Line
from .partition import FROM_END, Partition
from .split_tensor import SpatialGroups, SplitTensor, split

AXES = ("d", "h", "w")
MAX_COMPARED = 1 << 20  # elements of an input, by which ranks see that they have the same one


_groups_of: weakref.WeakKeyDictionary[Mesh, SpatialGroups] = weakref.WeakKeyDictionary()


def spatial_groups(mesh: Mesh) -> SpatialGroups:
    """Return the ranks along each divided axis, and groups of all combinations.

    It is the same for models, loaders and ``world.part``. The first call is collective.
    """
    if mesh not in _groups_of:
        _groups_of[mesh] = _create_groups(mesh)
    return _groups_of[mesh]


def _create_groups(mesh: Mesh) -> SpatialGroups:
    axes = [AXIS_WORDS[axis] for axis in AXES if AXIS_WORDS[axis] in mesh.shape]
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
    return each_tensor(value, lambda tensor: split_positions(tensor, groups))


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
            fewer = f"{axis[0]}{shape[dim]}" if shape[dim] > 1 else f"without {axis[0]}"
            raise ValueError(
                f"an input of shape {tuple(shape)} has {counted(shape[dim], 'row')} along the "
                f"{axis} for {len(line.ranks)} ranks. HINT: a layout {fewer}, or larger samples"
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
        found[dim - missing] = slice(*groups.rows(partition))
    return tuple(found)


@dataclass(frozen=True)
class LoadedParts:
    """How a loader divides samples [channels, [[depth,] height,] width], and their labels."""

    groups: SpatialGroups

    def cut(self, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
        """Return this rank's part of a sample; None if it has no positions to divide."""
        if len(shape) <= max(FROM_END[axis] for axis in self.groups.lines):
            return None
        return slices_of(shape, self.groups)

    def checks(self, i: int) -> bool:
        """Return whether this rank compares the checksum of a sample: one of its ranks does."""
        ranks = prod(len(line.ranks) for line in self.groups.lines.values())
        return i % ranks == self.groups.offset()

    def assemble(self, part: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return parts of samples, or of labels, as a tensor of the whole ones."""
        parts = {
            part.dim() - FROM_END[axis]: Partition.even(
                axis, shape[len(shape) - FROM_END[axis]], len(line.ranks)
            )
            for axis, line in self.groups.lines.items()
        }
        return SplitTensor(part, parts, self.groups)


def from_part(tensor: torch.Tensor, shape: Sequence[int], groups: SpatialGroups) -> SplitTensor:
    """Return this rank's part of samples of a shape as a divided tensor."""
    parts = even_parts(shape, groups)
    expected = groups.local_shape(shape, parts)
    if list(tensor.shape) != expected:
        raise ValueError(
            f"world.part: this rank's part of {tuple(shape)} has shape {tuple(expected)}, and the "
            f"tensor {tuple(tensor.shape)}. HINT: array[world.slices(array.shape)]"
        )
    return SplitTensor(tensor, parts, groups)


def check_same(value: Any, groups: SpatialGroups) -> None:
    """Check that the ranks of a sample have the same inputs. Collective.

    Raises:
        ValueError: They have not.
    """
    number = 0
    for tensor in tensors_in(value):
        number = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), number)
        if not isinstance(tensor, SplitTensor):
            flat = tensor.detach().reshape(-1)
            some = flat[:: max(flat.numel() // MAX_COMPARED, 1)].contiguous().cpu()
            number = zlib.crc32(some.view(torch.uint8).numpy().data, number)
    found = groups.numbers(number)
    others = [rank for rank, other in found.items() if other != number]
    if others:
        raise ValueError(
            f"{named_ranks(sorted(found))} share each sample, and the model got other inputs on "
            f"{named_ranks(others)} than here. HINT: world.shard(loader) gives them the same "
            "samples; random numbers of the script need one seed on all ranks"
        )
