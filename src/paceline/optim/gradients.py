"""The parameters and gradients of an optimizer, and the scale of its losses in float16."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from .whole_norms import local_part


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


def graph_nodes(roots: Iterable[Any], ends: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield the nodes of a graph of autograd, each once.

    Args:
        roots: ``grad_fn`` of tensors; None: of one without a gradient.
        ends: Nodes that are left out, with all that is reached through them only.
    """
    seen, waiting = {None, *ends}, list(roots)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


class LossScaling:
    """PyTorch's GradScaler, whose scale is updated once for the step of all optimizers.

    A loss may give gradients to several optimizers, which step one after the other: the scale must
    stay the same until the last of them has stepped. It is updated when no other optimizer has a
    gradient, at the latest at the batch's end or before an optimizer steps again. Gradients that
    wait for their step then (accumulation, or those that another model's loss left) are rescaled.

    Where ranks hold different parameters, all of them skip a step if one has an infinite gradient,
    and update the scale at the same time: at the batch's end.

    Attributes:
        scaler: The scaler, part of checkpoints.
        optimizers: All optimizers that share the scale; the owner adds to this list.
        stepped: Optimizers that have stepped, or skipped their step, since the last update.
        largest: Replaces a tensor by its largest value on all ranks; None where all of them hold
            the same parameters, or shards of FSDP2. Collective.
    """

    def __init__(self, device: str, optimizers: list[Optimizer]) -> None:
        self.scaler = torch.amp.GradScaler(device)
        self.optimizers = optimizers
        self.stepped: list[Optimizer] = []
        self.largest: Callable[[torch.Tensor], None] | None = None

    def before_step(self, optimizer: Optimizer, unscale: bool) -> None:
        """Prepare the gradients of an optimizer; ``unscale`` divides them by the scale now."""
        if any(optimizer is other for other in self.stepped):
            self.update()
        if self.largest is not None:
            self._unscale_on_all_ranks(optimizer, self.largest)
        elif unscale:
            self.scaler.unscale_(optimizer)

    def _unscale_on_all_ranks(
        self, optimizer: Optimizer, largest: Callable[[torch.Tensor], None]
    ) -> None:
        """Divide the gradients by the scale, and agree on whether one is infinite.

        PyTorch's scaler can't mix whole gradients and shards.
        """
        scale = self.scaler.scale(torch.ones(1, device=self.scaler._device))
        inverse, infinite = scale.double().reciprocal().float(), torch.zeros_like(scale)
        kinds: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in gradients_of(optimizer):
            part = local_part(gradient)
            part = part._values() if part.is_sparse else part
            kinds.setdefault(part.dtype, []).append(part)
        for parts in kinds.values():
            torch._amp_foreach_non_finite_check_and_unscale_(parts, infinite, inverse)
        largest(infinite)
        state = self.scaler._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = {infinite.device: infinite}
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer: Optimizer) -> bool:
        """Step an optimizer and zero its gradients, or skip the step if one is infinite.

        Return whether it stepped.
        """
        self.scaler.step(optimizer)
        found = self.scaler._found_inf_per_device(optimizer).values()
        has_stepped = not any(bool(flag) for flag in found)
        optimizer.zero_grad(set_to_none=True)
        self.stepped.append(optimizer)
        is_last = not any(has_gradients(parameters_of(optimizer)) for optimizer in self.optimizers)
        if is_last and self.largest is None:
            self.update()
        return has_stepped

    def update(self) -> None:
        """Update the scale if an optimizer has stepped since the last update."""
        if not self.stepped:
            return
        self.stepped.clear()
        pending = [g for optimizer in self.optimizers for g in gradients_of(optimizer)]
        before = self.scaler.get_scale() if pending else 0.0  # waits for a GPU
        self.scaler.update()
        if pending:
            factor = self.scaler.get_scale() / before
            for gradient in pending if factor != 1.0 else []:
                gradient.mul_(factor)
