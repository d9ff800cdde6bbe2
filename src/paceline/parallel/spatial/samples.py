"""Divide samples along depth, height and width over ranks (layout axes d, h and w).

Inputs of a model are divided, and arrays and datasets of which each rank reads only its part. A
tensor of samples has the dims (samples, channels, [[depth,] height,] width).
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
COMPARED_ELEMENTS = 1 << 20  # of each input, from which its checksum is computed: up to twice this

# Creating process groups is collective: models, loaders and ``world.part`` share those of a mesh.
_groups_of: weakref.WeakKeyDictionary[Mesh, SpatialGroups] = weakref.WeakKeyDictionary()


def spatial_groups(mesh: Mesh) -> SpatialGroups:
    """Return the ranks along each divided axis, and the process groups of all sets of axes.

    The first call for a mesh creates the groups, and is collective.
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
        frozenset(subset): mesh.group(*subset)
        for count in range(1, len(axes) + 1)
        for subset in combinations(axes, count)
    }
    return SpatialGroups(lines, groups)


def split_inputs(value: Any, groups: SpatialGroups) -> Any:
    """Replace each tensor in a model's inputs (any structure) by this rank's part of it."""
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
    """Return the partition of each divided dim of [samples, channels, [[depth,] height,] width].

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
            smaller = f"{axis[0]}{shape[dim]}" if shape[dim] > 1 else f"without {axis[0]}"
            raise ValueError(
                f"an input of shape {tuple(shape)} has {counted(shape[dim], 'row')} along the "
                f"{axis} for {len(line.ranks)} ranks. HINT: a layout {smaller}, or larger samples"
            )
        parts[dim] = Partition.even(axis, shape[dim], len(line.ranks))
    return parts


def slices_of(shape: Sequence[int], groups: SpatialGroups) -> tuple[slice, ...]:
    """Return this rank's part of an array [..., [[depth,] height,] width].

    Raises:
        ValueError: The shape lacks a divided dim, or has fewer rows than ranks.
    """
    missing = max(2 + max(FROM_END[axis] for axis in groups.lines) - len(shape), 0)
    # An array without samples and channels is divided like one sample of one channel. If more dims
    # are missing, a divided one is among them, and even_parts raises an error with the given shape.
    leading = missing if missing <= 2 else 0
    parts = even_parts((1,) * leading + tuple(shape), groups)
    found = [slice(None)] * len(shape)
    for dim, partition in parts.items():
        found[dim - leading] = slice(*groups.rows(partition))
    return tuple(found)


@dataclass(frozen=True)
class LoadedParts:
    """Division of a loader's samples [channels, [[depth,] height,] width], and of their labels.

    Implements ``SampleDivision`` of data/sampling/shard_loader.py.
    """

    groups: SpatialGroups

    def cut(self, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
        """Return this rank's part of a sample; None if it has no positions to divide."""
        if len(shape) <= max(FROM_END[axis] for axis in self.groups.lines):
            return None
        return slices_of(shape, self.groups)

    def checks(self, i: int) -> bool:
        """Return whether this rank verifies the checksum of sample ``i``.

        Exactly one of the ranks that share the sample does; they take turns by the sample's number.
        """
        ranks = prod(len(line.ranks) for line in self.groups.lines.values())
        return i % ranks == self.groups.offset()

    def assemble(self, part: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return this rank's part of a batch of samples, or of labels, as a divided tensor.

        Args:
            part: The part [samples, ...].
            shape: Shape of one whole sample or label, without the dim of samples.
        """
        parts = {
            part.dim() - FROM_END[axis]: Partition.even(
                axis, shape[len(shape) - FROM_END[axis]], len(line.ranks)
            )
            for axis, line in self.groups.lines.items()
        }
        return SplitTensor(part, parts, self.groups)


def from_part(tensor: torch.Tensor, shape: Sequence[int], groups: SpatialGroups) -> SplitTensor:
    """Return a divided tensor of which this rank holds ``tensor``.

    Args:
        shape: Shape of the whole.

    Raises:
        ValueError: The tensor does not have the shape of this rank's part, or ``shape`` can't be
            divided.
    """
    parts = even_parts(shape, groups)
    expected = groups.local_shape(shape, parts)
    if list(tensor.shape) != expected:
        raise ValueError(
            f"world.part: this rank's part of {tuple(shape)} has shape {tuple(expected)}, and the "
            f"tensor {tuple(tensor.shape)}. HINT: array[world.slices(array.shape)]"
        )
    return SplitTensor(tensor, parts, groups)


def check_same(value: Any, groups: SpatialGroups) -> None:
    """Check that the ranks that share each sample have equal inputs. Collective.

    A checksum is compared: of shapes and dtypes, and of at most 2 * COMPARED_ELEMENTS elements of
    each tensor. Of tensors that are divided already, only shapes and dtypes are compared.

    Raises:
        ValueError: The inputs of some ranks differ from those of this rank.
    """
    checksum = 0
    for tensor in tensors_in(value):
        checksum = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), checksum)
        if not isinstance(tensor, SplitTensor):
            flat = tensor.detach().reshape(-1)
            step = max(flat.numel() // COMPARED_ELEMENTS, 1)
            compared = flat[::step].contiguous().cpu()
            checksum = zlib.crc32(compared.view(torch.uint8).numpy().data, checksum)
    found = groups.numbers(checksum)
    others = [rank for rank, other in found.items() if other != checksum]
    if others:
        raise ValueError(
            f"{named_ranks(sorted(found))} share each sample, and the model got other inputs on "
            f"{named_ranks(others)} than on this rank. HINT: world.shard(loader) gives them the "
            "same samples; random numbers of the script need one seed on all ranks"
        )
