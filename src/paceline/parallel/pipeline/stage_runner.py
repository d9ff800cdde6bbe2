"""Forward and backward of one micro-batch in one (virtual) stage of this rank."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...optim.gradients import graph_nodes
from ...record.hooks.phases import has_users_hooks
from .stage_plan import ForwardPlan, StagePlan, Wire
from .trace import Event, Ref

Seed = Callable[[int], None]  # called with the number of an event


@dataclass(frozen=True)
class StageModule:
    """What a rank has of a model.

    Attributes:
        tensors: Parameters and buffers by name.
        constants: Tensors that modules hold as plain attributes.
        whole: Returns a nest with whole tensors in place of parts of the tensor axis.
    """

    module: nn.Module
    tensors: Callable[[str], torch.Tensor]
    constants: Mapping[str, torch.Tensor]
    whole: Callable[[Any], Any] = lambda nest: nest


@dataclass(eq=False)
class Activations:
    """What a stage holds of a micro-batch between its forward and its backward.

    Attributes:
        received: Leaves of the stage's graph.
        sent: Tensors that the next stage has.
        outputs: Of the last stage.
    """

    received: list[torch.Tensor]
    sent: list[torch.Tensor]
    outputs: Any = None


def run_forward(
    stage: StageModule,
    plan: ForwardPlan,
    number: int,
    inputs: Any,
    received: Sequence[torch.Tensor],
    seed: Seed,
) -> Activations:
    """Run the events of a stage.

    Args:
        number: Of the stage; the last one returns outputs.
        inputs: The micro-batch.
        received: Values of ``plan.stages[number].received``.
        seed: Called before each event.
    """
    own: StagePlan = plan.stages[number]
    values: dict[int, Any] = dict(enumerate(tree_flatten(inputs)[0]))
    leaves = []
    for wire, tensor in zip(own.received, received, strict=True):
        if wire.requires_grad and torch.is_grad_enabled():
            tensor.requires_grad_()
        leaves.append(tensor)
        # a leaf can't be changed in place
        values[wire.value] = tensor.clone() if wire.is_changed else tensor
    for (event_number, event), unneeded in zip(own.events, own.last_use, strict=True):
        seed(event_number)
        _run(stage, event, values)
        for value in unneeded:
            values.pop(value, None)
    sent = [_checked(wire, stage.whole(values[wire.value]), own) for wire in own.sent]
    found = Activations(leaves, sent)
    if number == len(plan.stages) - 1:
        outputs = [values[leaf.key] if isinstance(leaf, Ref) else leaf for leaf in plan.leaves]
        found.outputs = stage.whole(tree_unflatten(outputs, plan.spec))
    return found


def _run(stage: StageModule, event: Event, values: dict[int, Any]) -> None:
    leaves = [_value(stage, leaf, values) for leaf in event.leaves]
    args, options = tree_unflatten(leaves, event.spec)
    target: Any = event.target
    if isinstance(target, str):
        target = stage.module.get_submodule(target)
    with _context(event):
        out = target(*args, **options)
    results, _ = tree_flatten(out)
    if len(results) != len(event.results):
        raise ValueError(_changed_outputs(event, f"{len(results)} results"))
    pairs = zip(event.results, results, strict=True)
    values.update((number, result) for number, result in pairs if number is not None)


def _value(stage: StageModule, leaf: Any, values: Mapping[int, Any]) -> Any:
    if not isinstance(leaf, Ref):
        return leaf
    if leaf.kind == "value":
        return values[leaf.key]
    return stage.tensors(leaf.key) if leaf.kind == "tensor" else stage.constants[leaf.key]


def _context(event: Event) -> ExitStack:
    """Return the context of gradients and autocast in which the model runs an event."""
    contexts = ExitStack()
    if event.with_grad != torch.is_grad_enabled():
        contexts.enter_context(torch.set_grad_enabled(event.with_grad))
    kind = event.device
    now = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    if event.autocast != now:
        enabled, dtype = event.autocast
        contexts.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
    return contexts


def _checked(wire: Wire, tensor: torch.Tensor, own: StagePlan) -> torch.Tensor:
    if tuple(tensor.shape) != wire.shape or tensor.dtype != wire.dtype:
        made = [event for _, event in own.events if wire.value in event.results]
        found = f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"
        raise ValueError(_changed_outputs(made[-1], found) if made else found)
    return tensor


def _changed_outputs(event: Event, found: str) -> str:
    return (
        f"pipeline: {event.name} has returned {found}, and something else without data. HINT: "
        "outputs whose number, shapes and dtypes depend on the shapes of the inputs only"
    )


def run_backward(activations: Activations, gradients: Sequence[torch.Tensor | None]) -> None:
    """Run the backward of a stage that is not the last one; leaves have their gradients then.

    Args:
        gradients: Of each tensor of ``activations.sent``; None: it has none.
    """
    pairs = [
        (tensor, gradient)
        for tensor, gradient in zip(activations.sent, gradients, strict=True)
        if gradient is not None and tensor.requires_grad
    ]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


def check_hooks(model: nn.Module) -> None:
    """Raise ValueError for hooks on gradients, which would see those of each micro-batch."""
    for name, parameter in model.named_parameters():
        if has_users_hooks(parameter):
            raise ValueError(
                f"pipeline: the parameter {name} has a hook on its gradient, which would run for "
                "each micro-batch. HINT: change gradients between world.forward_backward and "
                "world.step(optimizer, clip=...), or layout='data'"
            )


def check_loss(loss: torch.Tensor, outputs: Any, stage: nn.Module) -> None:
    """Raise ValueError for a loss that reaches parameters of the stage beside the outputs.

    Such as a penalty over ``model.parameters()``, which would leave out those of other stages.
    """
    parameters = {id(parameter): name for name, parameter in stage.named_parameters()}
    ends = {t.grad_fn for t in tree_leaves(outputs) if torch.is_tensor(t)}
    for node in graph_nodes([loss.grad_fn], ends):
        name = parameters.get(id(getattr(node, "variable", None)))
        if name is not None:
            raise ValueError(
                f"world.forward_backward: the loss uses the parameter {name} beside the outputs, "
                "and the last stage of a pipeline has only its own parameters. HINT: weight_decay "
                "of the optimizer for a penalty; return what the loss needs from the forward"
            )
