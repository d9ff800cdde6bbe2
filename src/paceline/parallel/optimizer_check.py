"""Check that an optimizer's step is that of one process where ranks hold parts of a model.

By name for optimizers of PyTorch and of Paceline, and for any other one by a trial: a copy of the
optimizer steps small parameters, and the results with a part of them are compared.
"""

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..checkpoint.sharded_tensor import is_sharded
from ..data.sampling.sample_order import preserve_random_states
from ..optim import LAMB, LARS
from .strategy.distributed_model import DistributedModel

STEPS = 2
_SHAPE = (8, 6)
# their step uses all elements of a parameter
_NEEDS_WHOLE_PARAMETERS = frozenset(("Adafactor", "Muon"))
# their step uses all elements of all parameters
_NEEDS_ALL_PARAMETERS = frozenset(("LBFGS",))


def check_divided(model: DistributedModel, optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer whose step would differ from that of one process.

    It is called on all ranks when the model has been divided, before the first step. An optimizer
    that fails in the trial is accepted: it may need what only a training has, such as a closure.
    """
    parameters = model.parameters()
    has_parts = any(model.part_of(name) is not None for name in parameters)
    has_shards = any(map(is_sharded, parameters.values()))
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    missing = ""
    if kinds & _NEEDS_WHOLE_PARAMETERS and (has_parts or has_shards):
        missing = "whole parameters"
    elif model.is_parted and (kinds & _NEEDS_ALL_PARAMETERS or _combines_parameters(optimizer)):
        missing = "all parameters"
    if missing:
        raise ValueError(
            f"world.distribute: the step of {type(optimizer).__name__} needs {missing}, of which "
            "each rank holds a part in this layout. HINT: layout='data', or another "
            "optimizer, such as AdamW"
        )


def check_steps_of_pieces(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer whose step of a piece is not that piece of the whole step.

    LARS and LAMB are right, because their norms are those of whole parameters, but classes derived
    from them need not be.
    """
    if type(optimizer) in (LARS, LAMB):
        return
    kind = type(optimizer).__name__
    try:
        is_right = all(_divides_parameters(optimizer, group) for group in optimizer.param_groups)
        reason = "gives a piece of a parameter another step than the whole one"
    except Exception as error:  # whatever the optimizer raises
        is_right, reason = False, f"could not be tried with pieces of a parameter ({error})"
    if not is_right:
        raise ValueError(
            f"world.distribute: {kind} {reason}, so that it can't train a model that is divided "
            "over the tensor axis. HINT: an optimizer of single elements, such as AdamW"
        )


def _divides_parameters(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether pieces of a parameter get the same steps as the whole one."""
    (start,), gradients = _numbers(group, 1)
    (whole,) = _stepped(optimizer, group, [start], gradients)
    for dim in (0, 1):
        pieces = [
            _stepped(optimizer, group, [piece], [[g.chunk(2, dim)[i]] for (g,) in gradients])[0]
            for i, piece in enumerate(start.chunk(2, dim))
        ]
        if not _is_close(torch.cat(pieces, dim), whole):
            return False
    return True


def _combines_parameters(optimizer: Optimizer) -> bool:
    """Return whether the step of a parameter depends on the gradients of another one."""
    try:
        for group in optimizer.param_groups:
            starts, gradients = _numbers(group, 2)
            together = _stepped(optimizer, group, starts, gradients)
            for i, start in enumerate(starts):
                (alone,) = _stepped(optimizer, group, [start], [[each[i]] for each in gradients])
                if not _is_close(alone, together[i]):
                    return True
    except Exception:  # whatever the optimizer raises
        return False
    return False


def _numbers(
    group: dict[str, Any], count: int
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Return values of ``count`` parameters, and their gradients in each step."""
    like = next(iter(group["params"]), torch.empty(0))  # a stage may have none of the group
    generator = torch.Generator().manual_seed(3)

    def numbers(scale: float) -> list[torch.Tensor]:
        each = [scale * torch.randn(_SHAPE, generator=generator) for _ in range(count)]
        return [values.to(like.device, like.dtype) for values in each]

    return numbers(1.0), [numbers(3.0) for _ in range(STEPS)]


def _stepped(
    optimizer: Optimizer,
    group: dict[str, Any],
    starts: Sequence[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """Return parameters after steps of a copy of the optimizer, without its hooks.

    Args:
        gradients: Those of all parameters in each step.
    """
    parameters = [nn.Parameter(start.clone()) for start in starts]
    trial = copy.copy(optimizer)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**group, "params": parameters}]
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    with preserve_random_states():
        for each in gradients:
            for parameter, gradient in zip(parameters, each, strict=True):
                parameter.grad = gradient.clone()
            step(trial)
    return [parameter.detach() for parameter in parameters]


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-7)
