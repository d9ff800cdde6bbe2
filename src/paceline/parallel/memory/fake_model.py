"""Trace a step of a model from copies without data: the model itself and its device stay unused.

The step is forward, backward of the sum of all outputs, and an optimizer step. What the script's
loss function holds is therefore not in it; ``paceline run --show-memory`` traces the script's own.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ...cost.layout_memory import StepMemory
from ...data.sampling.sample_order import preserve_random_states
from ..placement import Autocast
from ..recompute.recomputation import recompute_blocks
from .setup import ForwardInputs, ModelSetup, copy_without_data, is_tensor
from .trace import TrainingStep, trace_step


def trace_model(
    setup: ModelSetup, inputs: ForwardInputs | None, recompute: str | None = None
) -> StepMemory:
    """Return the memory of a step of a model.

    Args:
        inputs: Arguments of its forward. None: the step has no forward, so that it holds
            parameters, gradients and optimizer states only.
        recompute: "blocks" or "selective"; None keeps all activations.

    Raises:
        ValueError: The model or optimizer can't be copied, or its step can't be traced.
    """
    with preserve_random_states():
        try:
            return trace_step(lambda: _step_of(setup, inputs, recompute))
        except ValueError:
            raise
        except Exception as error:  # of any code of the user's model
            first = str(error).strip().splitlines()[:1]
            raise ValueError(
                f"the memory of the {type(setup.model).__name__} can't be traced without data: "
                f"{type(error).__name__}{f': {first[0]}' if first else ''}. HINT: choose a layout, "
                "such as layout='zero3'"
            ) from error


def _step_of(
    setup: ModelSetup, inputs: ForwardInputs | None, recompute: str | None
) -> TrainingStep:
    """Return the step of a copy without data. Runs under a fake mode."""
    (model,), optimizers = copy_without_data(
        [setup.model], [setup.optimizer] if setup.optimizer is not None else [], setup.device
    )
    recompute_blocks(model, recompute, None, setup.recomputed_blocks, lambda _: None)
    if setup.autocast_dtype is not None:
        model.forward = Autocast(model.forward, setup.device.type, setup.autocast_dtype)
    given = inputs.without_data(setup.device) if inputs is not None else None

    def run() -> None:
        if given is None:
            outputs: Any = [p for p in model.parameters() if p.requires_grad]
        else:
            outputs = model(*given.args, **given.options)
        sum_of(tree_leaves(outputs)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.zero_grad()

    tensors = [t for t in tree_leaves(given and (given.args, given.options)) if is_tensor(t)]
    return TrainingStep([model], optimizers, tensors, run, setup.blocks)


def sum_of(outputs: Iterable[Any]) -> torch.Tensor:
    """Return the sum of all elements of floating-point tensors with a gradient."""
    sums = [t.sum().float() for t in outputs if is_tensor(t) and t.requires_grad]
    if not sums:
        raise ValueError(
            "no output of the model depends on a parameter. HINT: give inputs of a training step"
        )
    return torch.stack(sums).sum()
