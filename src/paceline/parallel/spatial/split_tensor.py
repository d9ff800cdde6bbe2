"""A tensor of samples of which each rank holds a part of the positions.

A function of torch without a rule is refused, but for tensors that an operation before has divided
differently from its input (``SplitTensor.is_free``): these are gathered.
"""

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from ...comm.group_device import gather_equal
from ...cost.layout_memory import size_text
from ..divided.divided_tensor import (
    NO_RULE,
    DividedTensor,
    Rules,
    changes_divided,
    divided_tensors,
    function_name,
)
from ..divided.module_names import layer
from ..divided.rules import pointwise, register_rules
from .exchange import Line, fetch, redivide, rows_of
from .partition import FROM_END, Partition, Rows, reshaped_parts

RULES = Rules()
register_rules(RULES)
rule_for = RULES.add
rule_for(torch.Tensor.requires_grad_)(pointwise)


class RefusedError(ValueError):
    """What can't be computed with parts of a sample."""


class SpatialGroups:
    """The ranks that share this rank's samples.

    Attributes:
        lines: Of each divided axis of the mesh, its ranks.
        groups: The process group of each set of axes.
        is_compared: Whether the model is compared with that of one process: random numbers are
            those of one process, and nothing is printed.
    """

    def __init__(self, lines: Mapping[str, Line], groups: Mapping[frozenset[str], Any]) -> None:
        self.lines, self.groups = lines, groups
        self.is_compared = False
        self.say: Callable[[str], None] = lambda line: None
        self._said: set[str] = set()

    def say_once(self, what: str, rest: str) -> None:
        """Print a line about what is gathered, once for each layer and function (``what``)."""
        if not self.is_compared and what not in self._said:
            self._said.add(what)
            self.say(f"{what} {rest}")

    def rows(self, partition: Partition) -> Rows:
        """Return the rows of this rank: the first one, and the one after the last."""
        return partition.part(self.lines[partition.axis].place)

    def local_shape(self, shape: Sequence[int], parts: Mapping[int, Partition]) -> list[int]:
        """Return the shape of this rank's part of a tensor."""
        local = list(shape)
        for dim, partition in parts.items():
            first, end = self.rows(partition)
            local[dim] = end - first
        return local

    def over(self, parts: Mapping[int, Partition], dims: Iterable[int]) -> Any:
        """Return the group over which the divided ones of some dims lie; None without one."""
        axes = frozenset(parts[dim].axis for dim in dims if dim in parts)
        return self.groups[axes] if axes else None

    @property
    def all(self) -> Any:
        """The group of all ranks that share this rank's samples."""
        return self.groups[frozenset(self.lines)]

    def numbers(self, number: int) -> dict[int, int]:
        """Return a number of each rank that shares this rank's samples, by rank. Collective."""
        found = gather_equal(torch.tensor([number]), self.all)
        ranks = dist.get_process_group_ranks(self.all)
        return {rank: int(value) for rank, value in zip(ranks, found, strict=True)}

    def offset(self, axes: Container[str] | None = None) -> int:
        """Return a number that differs between the ranks along some axes; None: along all."""
        number = 0
        for axis, line in self.lines.items():
            if axes is None or axis in axes:
                number = number * len(line.ranks) + line.place
        return number


class SplitTensor(DividedTensor):
    """This rank's part of a tensor, ``local``, with the shape of the whole.

    Attributes:
        parts: Of each divided dim, the partition of its rows.
        groups: The ranks that hold the other parts.
        is_free: Whether it is moved to other dims, or gathered, for functions that can't compute
            with its parts. Set for results that are not divided along the dims of their inputs.
    """

    parts: dict[int, Partition]
    groups: SpatialGroups
    is_free: bool
    rules = RULES
    gradient_hint = "call it with world.whole(tensor)"

    @staticmethod
    def __new__(
        cls: type["SplitTensor"],
        local: torch.Tensor,
        parts: Mapping[int, Partition],
        groups: SpatialGroups,
        is_free: bool = False,
    ) -> "SplitTensor":
        shape = list(local.shape)
        for dim, partition in parts.items():
            first, end = groups.rows(partition)
            assert shape[dim] == end - first, (shape, dim, partition)
            shape[dim] = partition.rows
        made = cls._of_shape(local, shape)
        made.parts, made.groups, made.is_free = dict(parts), groups, is_free
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        where = ", ".join(f"dim {dim}: {part.axis}" for dim, part in self.parts.items())
        return f"SplitTensor(shape={tuple(self.shape)}, {where}, local={self.local!r})"

    def like(self, local: torch.Tensor, parts: Mapping[int, Partition] | None = None) -> Any:
        """Return a tensor on the same ranks; a plain one if no dim is divided."""
        parts = self.parts if parts is None else parts
        return SplitTensor(local, parts, self.groups, self.is_free) if parts else local

    def whole(self, dims: Iterable[int] | None = None) -> torch.Tensor:
        """Return the whole tensor on all ranks, or whole along some dims. Collective."""
        self._check_graph()
        found, parts = self.local, dict(self.parts)
        for dim in self.parts if dims is None else dims:
            if dim in parts:
                partition = parts.pop(dim)
                windows = rows_of([(0, partition.rows)] * partition.ranks)
                found = fetch(found, dim, partition, windows, self.groups.lines[partition.axis])
        result: torch.Tensor = self.like(found, parts)
        return result

    @property
    def slices(self) -> tuple[slice, ...]:
        """Which part of the whole tensor this rank holds."""
        found = [slice(None)] * self.local.dim()
        for dim, partition in self.parts.items():
            found[dim] = slice(*self.groups.rows(partition))
        return tuple(found)

    def moved(self, parts: Mapping[int, Partition]) -> "SplitTensor":
        """Return the same tensor with other borders between the ranks. Collective."""
        assert parts.keys() == self.parts.keys()
        local = self.local
        for dim, new in parts.items():
            line = self.groups.lines[new.axis]
            local = fetch(local, dim, self.parts[dim], rows_of(new.parts()), line)
        return SplitTensor(local, parts, self.groups, self.is_free)

    def redivided(self, old: int, new: int, partition: Partition | None = None) -> "SplitTensor":
        """Return the same tensor divided along another dim. Collective.

        Args:
            old, new: The divided dim, and one that is whole.
            partition: Of the new dim; None: an even one.
        """
        parts = dict(self.parts)
        have = parts.pop(old)
        if partition is None:
            partition = Partition.even(have.axis, self.size(new), have.ranks)
        line = self.groups.lines[have.axis]
        local = redivide(self.local, (old, have), (new, partition), line)
        return SplitTensor(local, parts | {new: partition}, self.groups, True)

    def at_home(self) -> "SplitTensor":
        """Return the same tensor divided along positions [..., [[depth,] height,] width].

        Dims that are too small for their ranks remain divided as they are. Collective.
        """
        self._check_graph()
        found = self
        for dim, partition in self.parts.items():
            home = self.dim() - FROM_END[partition.axis]
            is_other = home != dim and home >= 2 and home not in found.parts
            if is_other and self.size(home) >= partition.ranks:
                found = found.redivided(dim, home)
        return found

    @property
    def divided_dims(self) -> Collection[int]:
        return self.parts.keys()

    def refusal(self, what: str) -> ValueError:
        return refused(
            f"{what} a tensor of shape {tuple(self.shape)}",
            "gather it for this layer (rules={'NAME': 'gather'} with the layer's name), or call "
            ".whole() on the tensor first",
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except RefusedError:
            kwargs = kwargs or {}
            free = [tensor for tensor in divided_tensors((args, kwargs)) if tensor.is_free]
            if not free or changes_divided(func, args, kwargs):
                raise
        others = {id(tensor): tensor.at_home() for tensor in free}
        if all(others[id(tensor)] is tensor for tensor in free):
            say_gathered(function_name(func), free)
            others = {id(tensor): tensor.whole() for tensor in free}
        args, kwargs = tree_map(lambda value: others.get(id(value), value), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def without_rule(
        cls, func: Any, tensors: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        raise tensors[0].refusal(f"{function_name(func)} is not known to be right for")

    def placed(self, local: torch.Tensor, dims: Mapping[int, int]) -> Any:
        return self.like(local, {dims[dim]: part for dim, part in self.parts.items()})

    def in_shape(self, shape: tuple[int, ...], is_view: bool) -> Any:
        parts: dict[int, Partition] = {}
        lost, is_free = [], self.is_free
        for dim, partition in self.parts.items():
            found = reshaped_parts(self.shape, shape, dim, partition)
            if found is None or found[0] in parts:
                lost.append(dim)
            else:
                parts[found[0]] = found[1]
                is_free |= found[1] != partition
        if not parts:
            return NO_RULE
        if lost:
            rest = self.whole(lost)
            assert isinstance(rest, SplitTensor)
            rest.is_free = True
            return rest.reshape(shape)
        local = self.local.reshape(self.groups.local_shape(shape, parts))
        return SplitTensor(local, parts, self.groups, is_free)

    def division_of(self, operands: list[torch.Tensor], shape: torch.Size) -> dict[int, Partition]:
        return merged_parts(operands, shape)

    def aligned(self, operand: Any, shape: torch.Size, division: Mapping[int, Partition]) -> Any:
        if not isinstance(operand, torch.Tensor):
            return operand
        shift = len(shape) - operand.dim()
        parts = {dim - shift: part for dim, part in division.items() if dim >= shift}
        parts = {dim: part for dim, part in parts.items() if operand.size(dim) == part.rows}
        return rows_at(operand, parts, self.groups)

    def divided_like(self, local: torch.Tensor, division: Mapping[int, Partition]) -> Any:
        return self.like(local, division)


def merged_parts(tensors: Iterable[torch.Tensor], shape: torch.Size) -> dict[int, Partition]:
    """Return the partitions of the dims of a broadcast result."""
    found = [
        (dim + len(shape) - tensor.dim(), partition)
        for tensor in tensors
        if isinstance(tensor, SplitTensor)
        for dim, partition in tensor.parts.items()
    ]
    found = [(dim, partition) for dim, partition in found if partition.rows == shape[dim]]
    # partitions of positions first
    found.sort(key=lambda pair: pair[0] != len(shape) - FROM_END[pair[1].axis])
    parts: dict[int, Partition] = {}
    for dim, partition in found:  # an axis divides one dim only
        if partition.axis not in {other.axis for other in parts.values()}:
            parts.setdefault(dim, partition)
    return parts


def rows_at(
    tensor: torch.Tensor, parts: Mapping[int, Partition], groups: SpatialGroups
) -> torch.Tensor:
    """Return this rank's rows of a tensor for some partitions, as a plain tensor.

    A tensor that is divided otherwise is divided again, or gathered. Collective.
    """
    if not isinstance(tensor, SplitTensor):
        return part_of(tensor, parts, groups)
    found: Any = tensor
    for dim, partition in tensor.parts.items():
        if dim in parts and parts[dim].axis == partition.axis:
            continue
        new = next((d for d, other in parts.items() if other.axis == partition.axis), None)
        if new is not None and new not in found.parts:
            found = found.redivided(dim, new, parts[new])
        else:
            found = found.whole([dim])
    if not isinstance(found, SplitTensor):
        return part_of(found, parts, groups)
    kept = {dim: parts[dim] for dim in found.parts}
    local = (found if kept == found.parts else found.moved(kept)).local
    rest = {dim: partition for dim, partition in parts.items() if dim not in kept}
    return part_of(local, rest, groups)


def split(
    tensor: torch.Tensor, parts: Mapping[int, Partition], groups: SpatialGroups
) -> SplitTensor:
    """Return this rank's part of a tensor that all ranks have."""
    return SplitTensor(part_of(tensor, parts, groups).contiguous(), parts, groups)


def part_of(
    tensor: torch.Tensor, parts: Mapping[int, Partition], groups: SpatialGroups
) -> torch.Tensor:
    """Return the rows of this rank of a plain tensor."""
    for dim, partition in parts.items():
        first, end = groups.rows(partition)
        tensor = tensor.narrow(dim, first, end - first)
    return tensor


def say_gathered(name: str, tensors: Iterable[SplitTensor]) -> None:
    """Print once for a layer what it gathers."""
    gathered = list(tensors)
    size = sum(tensor.numel() * tensor.element_size() for tensor in gathered)
    gathered[0].groups.say_once(
        f"{layer()}: {name}",
        f"reads all positions, so each rank gathers {size_text(size)} in each forward",
    )


def refused(what: str, hint: str) -> RefusedError:
    """Return the error for what can't be computed with parts of a sample."""
    return RefusedError(f"{layer()}: {what}, whose sample is divided over ranks. HINT: {hint}")
