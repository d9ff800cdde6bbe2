"""Whether an optimizer may step pieces of parameters: its result must be that of whole ones."""

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...optim import LAMB, LARS

STEPS = 2


def check_steps_of_pieces(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer whose step of a piece is not that piece of the whole step.

    A copy of the optimizer steps a small parameter, whole and in pieces. LARS and LAMB are right,
    because their norms are those of whole parameters, but classes derived from them need not be.
    """
    if type(optimizer) in (LARS, LAMB):
        return
    kind = type(optimizer).__name__
    try:
        is_right = all(_steps_alike(optimizer, group) for group in optimizer.param_groups)
        reason = "gives a piece of a parameter another step than the whole one"
    except Exception as error:  # whatever the optimizer raises
        is_right, reason = False, f"could not be tried with pieces of a parameter ({error})"
    if not is_right:
        raise ValueError(
            f"world.distribute: {kind} {reason}, so that it can't train a model that is divided "
            "over the tensor axis. HINT: an optimizer of single elements, such as AdamW"
        )


def _steps_alike(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    like = next(iter(group["params"]), None)
    if like is None:
        return True
    generator = torch.Generator().manual_seed(3)

    def numbers() -> torch.Tensor:
        return torch.randn(8, 6, generator=generator).to(like.device, like.dtype)

    start, gradients = numbers(), [numbers() * 3 for _ in range(STEPS)]
    whole = _stepped(optimizer, group, start, gradients)
    for dim in (0, 1):
        parts = [
            _stepped(optimizer, group, part, [g.chunk(2, dim)[i] for g in gradients])
            for i, part in enumerate(start.chunk(2, dim))
        ]
        if not torch.allclose(torch.cat(parts, dim), whole, rtol=1e-4, atol=1e-7):
            return False
    return True


def _stepped(
    optimizer: Optimizer, group: dict[str, Any], start: torch.Tensor, gradients: list[torch.Tensor]
) -> torch.Tensor:
    parameter = nn.Parameter(start.clone())
    own = copy.copy(optimizer)
    own.state = defaultdict(dict)
    own.param_groups = [{**group, "params": [parameter]}]
    for gradient in gradients:
        parameter.grad = gradient.clone()
        type(optimizer).step(own)
    return parameter.detach()
