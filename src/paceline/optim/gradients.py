"""The parameters and gradients of an optimizer."""

from collections.abc import Iterable

import torch
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def count_parameters(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def has_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether any of the parameters has a gradient."""
    return any(parameter.grad is not None for parameter in parameters)


def gradients_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the gradients that an optimizer would step with."""
    return [p.grad for p in parameters_of(optimizer) if p.grad is not None]
