"""What the memory of a model's step is predicted from: the model, its optimizer and its inputs."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from ...cost.layout import Layout
from ...optim.gradients import parameters_of
from ..blocks import recomputed_blocks
from ..placement import empty_as


@dataclass(frozen=True)
class ModelSetup:
    """A model as it is given to ``world.distribute``, and how its step runs.

    Attributes:
        model: The model, not distributed yet; its tensors may be on the device "meta".
        optimizer: Its optimizer, or None.
        device: The device on which it will compute.
        autocast_dtype: Dtype of autocast, or None.
        blocks: The option of ``world.distribute``.
        recomputed_blocks: The option of ``world.distribute``.
        accumulate: Batches of one optimizer step.
        recomputes: Whether the model's blocks recompute their activations already.
    """

    model: nn.Module
    optimizer: Optimizer | None
    device: torch.device
    autocast_dtype: torch.dtype | None = None
    blocks: Sequence[str] | None = None
    recomputed_blocks: Sequence[str] | None = None
    accumulate: int = 1
    recomputes: bool = False

    def has_recomputable_blocks(self) -> bool:
        """Return whether recomputation would change what the model holds."""
        names = self.recomputed_blocks
        return not self.recomputes and bool(recomputed_blocks(self.model, names))


@dataclass(frozen=True)
class ScriptLimits:
    """What a script's ``world.distribute`` leaves to choose, as ``layout="auto"`` would choose.

    Attributes:
        recompute: Its option of this name.
        memory_budget: Its option of this name.
        per_node: Whether the model is sharded over the ranks of a node (``shard_over="host"``).
        problems: Why layouts are impossible, by layout.
    """

    recompute: str | None = None
    memory_budget: float | None = None
    per_node: bool = False
    problems: Mapping[Layout, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ForwardInputs:
    """The arguments of a model's forward; shapes and dtypes matter, values do not."""

    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def without_data(self, device: torch.device) -> "ForwardInputs":
        """Return the same arguments as tensors without data on this device."""
        found = tree_map_only(
            torch.Tensor, lambda t: empty_as(t, device), (self.args, self.options)
        )
        return ForwardInputs(*found)

    @classmethod
    def parse(cls, value: Any) -> "ForwardInputs | None":
        """Return the inputs that a tensor, a tuple or list, or a dict of arguments stands for."""
        if value is None:
            return None
        if isinstance(value, Mapping):
            return cls((), dict(value))
        return cls(tuple(value) if isinstance(value, (tuple, list)) else (value,))


def copy_without_data(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], device: torch.device
) -> tuple[list[nn.Module], list[Optimizer]]:
    """Return copies whose parameters, buffers and states have no data.

    Runs under a fake mode, or copies to the device "meta".

    Tied weights stay tied, and the optimizers hold the parameters of the copies.
    """
    tensors: list[torch.Tensor] = []
    for model in models:
        tensors += [*model.parameters(), *model.buffers()]
    for optimizer in optimizers:
        tensors += parameters_of(optimizer)
        tensors += [t for t in tree_leaves(list(optimizer.state.values())) if torch.is_tensor(t)]
    memo: dict[int, Any] = {id(t): empty_as(t, device) for t in tensors}
    found: tuple[list[nn.Module], list[Optimizer]] = copy.deepcopy(
        (list(models), list(optimizers)), memo
    )
    return found
