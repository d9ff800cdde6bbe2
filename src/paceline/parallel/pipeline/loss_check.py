"""Refuse losses that use parameters directly: the last stage has only its own ones."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


def check_loss(loss: torch.Tensor, outputs: Any, stage: nn.Module) -> None:
    """Raise ValueError for a loss that reaches parameters of the stage beside the outputs.

    Such as a penalty over ``model.parameters()``, which would leave out those of other stages.
    """
    parameters = {id(parameter): name for name, parameter in stage.named_parameters()}
    seen: set[Any] = {None, *(t.grad_fn for t in tree_leaves(outputs) if torch.is_tensor(t))}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        name = parameters.get(id(getattr(node, "variable", None)))
        if name is not None:
            raise ValueError(
                f"world.forward_backward: the loss uses the parameter {name} beside the outputs, "
                "and the last stage of a pipeline has only its own parameters. HINT: weight_decay "
                "of the optimizer for a penalty; return what the loss needs from the forward"
            )
        waiting.extend(following for following, _ in node.next_functions)
