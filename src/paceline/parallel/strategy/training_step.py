"""One batch of ``world.forward_backward``, as a strategy runs it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...record.ring.states import State

Loss = Callable[[Any, Any], Any]


def call(module: nn.Module, inputs: Any) -> Any:
    """Call a module with a tensor, a tuple of positional or a dict of keyword arguments."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


@dataclass(frozen=True)
class TrainingStep:
    """Inputs, targets and loss of one batch, and what surrounds its backward.

    Attributes:
        module: What this rank computes with, in all its strategies.
        inputs: A tensor, a tuple of positional arguments or a dict of keyword arguments.
        targets: Any nest of tensors.
        loss: Called with outputs and targets; see ``loss_of``.
        backward: Returns the context of the backward of the whole batch. Its argument is the mean
            loss, or None on a rank that computes no loss.
        scaled: Returns what to call ``backward()`` of, for a mean loss and the weight of its
            samples. A part of the batch (micro-batch) has its share of it as a third argument.
        note_exchange: Called with a group and gradients that are about to be averaged over it
            outside of a backward.
        note_part: Called with the state and the start (ns) of a part of the step that has ended,
            the number of its micro-batch (from 1), and its amount in the record. Parts take the
            place of the backward of the whole batch in the record.
    """

    module: nn.Module
    inputs: Any
    targets: Any
    loss: Loss
    backward: Callable[[torch.Tensor | None], AbstractContextManager[None]]
    scaled: Callable[..., torch.Tensor]
    note_exchange: Callable[[Any, Any], None] = lambda group, gradients: None
    note_part: Callable[[State, int, int, int], None] = lambda *_: None

    def call(self, module: nn.Module | None = None, inputs: Any = None) -> Any:
        """Run a forward; default: of the whole module with all inputs."""
        return call(
            self.module if module is None else module, self.inputs if inputs is None else inputs
        )

    def loss_of(self, outputs: Any, targets: Any = None) -> tuple[torch.Tensor, Any]:
        """Return the mean loss, and the weight of the samples; None: each sample counts one.

        Raises:
            ValueError: The loss is no tensor of one element, nor a pair of a sum and a weight.
        """
        value = self.loss(outputs, self.targets if targets is None else targets)
        if isinstance(value, tuple) and len(value) == 2:
            total, weight = value
            if isinstance(total, torch.Tensor) and total.numel() == 1:
                weight = torch.as_tensor(weight, device=total.device, dtype=total.dtype).detach()
                # without weight there is nothing to train: the sum is 0 then
                return total / weight.clamp(min=torch.finfo(total.dtype).tiny), weight
        elif isinstance(value, torch.Tensor) and value.numel() == 1:
            return value, None
        is_tensor = isinstance(value, torch.Tensor)
        found = (
            f"has the shape {tuple(value.shape)}" if is_tensor else f"is a {type(value).__name__}"
        )
        raise ValueError(
            "world.forward_backward: loss must return the mean over the samples as a tensor of one "
            f"element, or their sum and their weight; this {found}. HINT: "
            "loss=torch.nn.functional.cross_entropy"
        )
