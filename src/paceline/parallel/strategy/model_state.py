"""State of models of which ranks hold different parts, under the names of the whole model.

A checkpoint has a section that is equal on all ranks, which they write together, and sections of
the ranks. Where a layout gives ranks other parameters (``DistributedModel.parted_axes``), each part
is in the section of the first rank that holds it: a model's by name, an optimizer's by the place of
its parameter in the optimizer of the whole model. Any layout restores the merged state.

A rank of a divided model can't see that another rank's part does not fit a checkpoint. So every
rank notes names and shapes of the whole model before it is divided, and compares all of them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...checkpoint.shard_copies import PartPath, ShardDigests, TensorPath
from ...checkpoint.sharded_tensor import Piece, SavedTensor, is_sharded, piece_of
from ...checkpoint.shared_state import new_piece
from ...optim.gradients import parameters_of
from ..mesh import Mesh
from .distributed_model import DistributedModel, Part

Tree = dict[int, Any]  # states by the number of their parameter
Shape = tuple[int, ...]


@dataclass(frozen=True)
class WholeModel:
    """What a checkpoint has of a model that a layout divides.

    Attributes:
        shapes: Shape of each entry of ``state_dict``, by name; () for other values than tensors.
    """

    shapes: Mapping[str, Shape]

    @classmethod
    def of(cls, model: nn.Module) -> "WholeModel":
        """Return names and shapes before a layout divides the model."""
        return cls({name: _shape(value) for name, value in model.state_dict().items()})


@dataclass(frozen=True)
class WholeOptimizer:
    """Where an optimizer's parameters are in the optimizer of the whole model.

    Attributes:
        names: Of each group, the names of its parameters.
        shapes: Of each group, their shapes in the whole model.
    """

    names: tuple[tuple[str, ...], ...]
    shapes: tuple[tuple[Shape, ...], ...]

    @classmethod
    def of(cls, optimizer: Optimizer, model: nn.Module) -> "WholeOptimizer":
        """Return the places before a layout divides the model.

        Raises:
            ValueError: The optimizer has a parameter that is not the model's.
        """
        known = {id(p): name for name, p in model.named_parameters()}
        groups = [group["params"] for group in optimizer.param_groups]
        if any(id(p) not in known for group in groups for p in group):
            raise ValueError(
                f"world.distribute: the {type(optimizer).__name__} holds parameters that the "
                f"{type(model).__name__} does not have, which a layout that divides models does "
                "not support. HINT: one optimizer for each model"
            )
        return cls(
            tuple(tuple(known[id(p)] for p in group) for group in groups),
            tuple(tuple(tuple(p.shape) for p in group) for group in groups),
        )

    def numbers(self) -> dict[str, int]:
        """Return the number of each parameter in ``state_dict`` of the whole optimizer."""
        flat = [name for group in self.names for name in group]
        return {name: number for number, name in enumerate(flat)}


class OwnedState:
    """What this rank saves of the models and optimizers that are divided.

    Attributes:
        mesh: The ranks.
        models: The models of the world.
        optimizers: By the id of an optimizer of a divided model, its places.
        wholes: By the id of a divided model, what it was before.
    """

    def __init__(self, mesh: Mesh, models: Sequence[DistributedModel]) -> None:
        self.mesh, self.models = mesh, models
        self.optimizers: dict[int, WholeOptimizer] = {}
        self.wholes: dict[int, WholeModel] = {}

    def note_optimizer(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Note the places of an optimizer's parameters before a layout divides the model."""
        self.optimizers[id(optimizer)] = WholeOptimizer.of(optimizer, model)

    def note_model(self, model: DistributedModel, whole: WholeModel) -> None:
        """Note what a model was before a layout divided it."""
        self.wholes[id(model)] = whole

    def whole_of(self, plain: Any) -> WholeModel | WholeOptimizer | None:
        """Return what a checkpoint has of a module or optimizer that is divided, else None."""
        model = self.divided(plain)
        if model is None:
            return None
        return (
            self.optimizers[id(plain)] if isinstance(plain, Optimizer) else self.wholes[id(model)]
        )

    def divided_model(self, module: nn.Module) -> DistributedModel | None:
        """Return what ``world.distribute`` has made of a module, if ranks hold different parts."""
        for model in self.models:
            if module in (model.called, model.plain):
                return self.divided(model.plain)
        return None

    def divided(self, plain: Any) -> DistributedModel | None:
        """Return the model of a module or optimizer, if ranks hold different parts of it."""
        if not self.mesh.is_divided:
            return None
        for model in self.models:
            is_its = plain is model.plain or self._trains(plain, model.parameters().values())
            if is_its:
                return model if model.is_parted else None
        return None

    def _trains(self, plain: Any, parameters: Iterable[torch.Tensor]) -> bool:
        if not isinstance(plain, Optimizer) or id(plain) not in self.optimizers:
            return False
        ids = set(map(id, parameters))
        return any(id(p) in ids for p in parameters_of(plain))

    # saving

    def split(self, part: Any) -> tuple[Any, Any]:
        """Return the state of a module or optimizer that is equal on all ranks, and this rank's.

        Raises:
            ValueError: A state of an optimizer can't be joined from the ranks' parts.
        """
        model, state = self.divided(part), part.state_dict()
        if model is None:
            return state, None
        if isinstance(part, Optimizer):
            return self._split_optimizer(part, model, state)
        shared, own = {}, {}
        for name, value in state.items():
            axes = model.parted_axes(name)
            if not axes:
                shared[name] = value
            elif (found := self._owned(value, axes, model.part_of(name), name)) is not None:
                own[name] = found
        return shared, own

    def _owned(self, value: Any, axes: frozenset[str], part: Part | None, name: str) -> Any:
        """Return what this rank saves of a value of which ranks hold different parts, or None."""
        if is_sharded(value):
            piece = piece_of(value, name, lambda tensor: self.mesh.copies_of(tensor, axes))
            if piece is None or part is None:
                return piece
            # a shard of this rank's part
            return _pieces(part, piece["offset"], piece["tensor"])
        if min(self.mesh.copies_of(value, axes)) != self.mesh.rank:
            return None
        if part is None or not isinstance(value, torch.Tensor) or not value.dim():
            return value
        if tuple(value.shape) != part.shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)} on this rank, whose part of the parameter "
                f"has {part.shape}: a layout that divides models can only save states of the "
                "parameter's shape. HINT: torch.optim.AdamW, or another optimizer with such states"
            )
        return _pieces(part, (0,) * value.dim(), value)

    def _split_optimizer(
        self, part: Optimizer, model: DistributedModel, state: Any
    ) -> tuple[Any, Any]:
        whole = self.optimizers[id(part)]
        numbers, names = whole.numbers(), self._names(part, model)
        shared: Tree = {}
        own: Tree = {}
        for local, values in state["state"].items():
            name = names[local]
            axes = model.axes_of_states(name)
            if not axes:
                shared[numbers[name]] = values
                continue
            place = model.part_of(name)
            each = {k: self._owned(v, axes, place, f"{k} of {name}") for k, v in values.items()}
            own[numbers[name]] = {key: value for key, value in each.items() if value is not None}
        groups = [
            {**group, "params": [numbers[name] for name in of]}
            for group, of in zip(state["param_groups"], whole.names, strict=True)
        ]
        return {**state, "state": shared, "param_groups": groups}, {"state": own}

    def add_digests(self, found: ShardDigests, path: PartPath, part: Any) -> None:
        """Add digests of the parts of a module or optimizer that other ranks hold too.

        Buffers are left out: ranks differ in running statistics between forwards.
        """
        model = self.divided(part)
        if model is None:
            return
        state = part.state_dict()
        names: Collection[str] = model.parameters().keys()
        values: list[tuple[TensorPath, str, Any]]
        values = [((name,), name, value) for name, value in state.items()]
        if isinstance(part, Optimizer):
            of_numbers = self._names(part, model)
            names = set(of_numbers)
            values = [
                (("state", of_numbers[number], key), of_numbers[number], value)
                for number, of in state["state"].items()
                for key, value in of.items()
            ]
        for keys, name, value in values:
            of = model.axes_of_states if isinstance(part, Optimizer) else model.parted_axes
            axes = of(name)
            if axes and name in names and isinstance(value, torch.Tensor):
                found.add_copies(path, keys, value, self.mesh.copies_of(value, axes))

    def _names(self, optimizer: Optimizer, model: DistributedModel) -> list[str]:
        known = {id(p): name for name, p in model.parameters().items()}
        return [known.get(id(p), "") for p in parameters_of(optimizer)]

    # restoring

    def local(self, part: Any, state: Any) -> Any:
        """Return this rank's part of the whole state of a module or optimizer, which fits it."""
        model = self.divided(part)
        if model is None:
            return state
        if not isinstance(part, Optimizer):
            names = [name for name in part.state_dict() if name in state]  # see ``whole_of``
            return {name: _cut(state[name], model.part_of(name)) for name in names}
        numbers, names = self.optimizers[id(part)].numbers(), self._names(part, model)
        found = {}
        for local, name in enumerate(names):
            values = state["state"].get(numbers[name])
            if values is not None and model.holds_states(name):
                place = model.part_of(name)
                found[local] = {key: _cut(value, place) for key, value in values.items()}
        groups, first = [], 0
        for saved, own in zip(state["param_groups"], part.param_groups, strict=True):
            count = len(own["params"])
            groups.append({**saved, "params": list(range(first, first + count))})
            first += count
        return {**state, "state": found, "param_groups": groups}


def _shape(value: Any) -> Shape:
    return () if is_lazy(value) else tuple(getattr(value, "shape", ()))


def _pieces(part: Part, offset: Shape, tensor: torch.Tensor) -> list[Piece]:
    """Return a range of this rank's part of a tensor as pieces of the whole one."""
    slabs = part.slabs(offset, tuple(tensor.shape))
    return [new_piece(part.whole, first, tensor[place]) for first, place in slabs]


def _cut(value: Any, part: Part | None) -> Any:
    """Return this rank's part of a whole tensor; another value as it is."""
    if part is None or not isinstance(value, torch.Tensor | SavedTensor):
        return value
    if tuple(value.shape) != part.whole:
        return value
    found = torch.empty(part.shape, dtype=value.dtype)
    for offset, place in part.slabs((0,) * len(part.shape), part.shape):
        dest = found[place]
        if isinstance(value, SavedTensor):
            value.copy_part(offset, dest)
        else:
            at = tuple(slice(o, o + n) for o, n in zip(offset, dest.shape, strict=True))
            dest.copy_(value[at])
    return found
