"""The parameters and gradients of an optimizer."""

import torch
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def count_parameters(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def has_gradients(optimizer: Optimizer) -> bool:
    """Return whether any parameter of an optimizer has a gradient."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def gradients_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the gradients that an optimizer would step with."""
    return [p.grad for p in parameters_of(optimizer) if p.grad is not None]
