"""State of models of which ranks hold different parts, under the names of the whole model.

A checkpoint has a section that is equal on all ranks, which they write together, and sections of
the ranks. Where a layout gives ranks other parameters (``DistributedModel.parted_axes``), each part
is in the section of the first rank that holds it: a model's by name, an optimizer's by the place of
its parameter in the optimizer of the whole model. Any layout restores the merged state.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...checkpoint.sharded_tensor import SavedTensor, held_part, is_sharded
from ...checkpoint.shared_state import new_piece
from ...optim.gradients import parameters_of
from ..mesh import Mesh
from .distributed_model import DistributedModel, Part

Tree = dict[int, Any]  # states by the number of their parameter


@dataclass(frozen=True)
class WholeOptimizer:
    """Where an optimizer's parameters are in the optimizer of the whole model.

    Attributes:
        names: Of each group, the names of its parameters.
    """

    names: tuple[tuple[str, ...], ...]

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
        return cls(tuple(tuple(known[id(p)] for p in group) for group in groups))

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
    """

    def __init__(self, mesh: Mesh, models: Sequence[DistributedModel]) -> None:
        self.mesh, self.models = mesh, models
        self.optimizers: dict[int, WholeOptimizer] = {}

    def note_optimizer(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Note the places of an optimizer's parameters before a layout divides the model."""
        self.optimizers[id(optimizer)] = WholeOptimizer.of(optimizer, model)

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
        """Return the state of a module or optimizer that is equal on all ranks, and this rank's."""
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
            elif (found := self._owned(value, axes, model.part_of(name))) is not None:
                own[name] = found
        return shared, own

    def _owned(self, value: Any, axes: frozenset[str], part: Part | None) -> Any:
        """Return what this rank saves of a value of which ranks hold different parts, or None."""
        if min(self.mesh.copies_of(value, axes)) != self.mesh.rank:
            return None
        if is_sharded(value):
            offset, _ = held_part(value)
            return new_piece(value.shape, offset, value.to_local())
        if part is None or not _is_like(value, part):
            return value
        return new_piece(part.whole, part.offset, value)

    def _split_optimizer(
        self, part: Optimizer, model: DistributedModel, state: Any
    ) -> tuple[Any, Any]:
        whole = self.optimizers[id(part)]
        numbers, names = whole.numbers(), self._names(part, model)
        shared: Tree = {}
        own: Tree = {}
        for local, values in state["state"].items():
            name = names[local]
            axes = model.parted_axes(name)
            if not axes:
                shared[numbers[name]] = values
                continue
            each = {k: self._owned(v, axes, model.part_of(name)) for k, v in values.items()}
            own[numbers[name]] = {key: value for key, value in each.items() if value is not None}
        groups = [
            {**group, "params": [numbers[name] for name in of]}
            for group, of in zip(state["param_groups"], whole.names, strict=True)
        ]
        return {**state, "state": shared, "param_groups": groups}, {"state": own}

    def _names(self, optimizer: Optimizer, model: DistributedModel) -> list[str]:
        known = {id(p): name for name, p in model.parameters().items()}
        return [known.get(id(p), "") for p in parameters_of(optimizer)]

    # restoring

    def local(self, part: Any, state: Any) -> Any:
        """Return this rank's part of the whole state of a module or optimizer."""
        model = self.divided(part)
        if model is None:
            return state
        if not isinstance(part, Optimizer):
            names = [name for name in part.state_dict() if name in state]
            return {name: _cut(state[name], model.part_of(name)) for name in names}
        numbers, names = self.optimizers[id(part)].numbers(), self._names(part, model)
        found = {}
        for local, name in enumerate(names):
            values = state["state"].get(numbers[name])
            if values is not None:
                place = model.part_of(name)
                found[local] = {key: _cut(value, place) for key, value in values.items()}
        groups, first = [], 0
        for saved, own in zip(state["param_groups"], part.param_groups, strict=True):
            count = len(own["params"])
            groups.append({**saved, "params": list(range(first, first + count))})
            first += count
        return {**state, "state": found, "param_groups": groups}


def _is_like(value: Any, part: Part) -> bool:
    return isinstance(value, torch.Tensor) and tuple(value.shape) == part.shape


def _cut(value: Any, part: Part | None) -> Any:
    """Return this rank's part of a whole tensor; another value as it is."""
    if part is None or not isinstance(value, torch.Tensor | SavedTensor):
        return value
    if tuple(value.shape) != part.whole:
        return value
    if isinstance(value, SavedTensor):
        return value.part(part.offset, part.shape)
    at = tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))
    return value[at].clone()
