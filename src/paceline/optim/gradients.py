"""The parameters and gradients of an optimizer."""

import torch
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the gradients that an optimizer would step with."""
    return [p.grad for p in parameters_of(optimizer) if p.grad is not None]
