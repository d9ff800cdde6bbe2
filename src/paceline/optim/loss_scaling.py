"""Loss scaling of float16 for several optimizers that share one scale."""

import torch
from torch.optim import Optimizer

from .gradients import gradients_of, has_gradients, parameters_of


class LossScaling:
    """PyTorch's GradScaler, whose scale is updated once for the step of all optimizers.

    A loss may give gradients to several optimizers, which step one after the other: the scale must
    stay the same until the last of them has stepped. It is updated when no other optimizer has a
    gradient, at the latest at the batch's end or before an optimizer steps again. Gradients that
    wait for their step then (accumulation, or those that another model's loss left) are rescaled.

    Attributes:
        scaler: The scaler, part of checkpoints.
        optimizers: All optimizers that share the scale; the owner adds to this list.
        stepped: Optimizers that have stepped, or skipped their step, since the last update.
    """

    def __init__(self, device: str, optimizers: list[Optimizer]) -> None:
        self.scaler = torch.amp.GradScaler(device)
        self.optimizers = optimizers
        self.stepped: list[Optimizer] = []

    def before_step(self, optimizer: Optimizer, unscale: bool) -> None:
        """Prepare the gradients of an optimizer; ``unscale`` divides them by the scale now."""
        if any(optimizer is other for other in self.stepped):
            self.update()
        if unscale:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Step an optimizer and zero its gradients, or skip the step if one is infinite.

        Return whether it stepped.
        """
        self.scaler.step(optimizer)
        found = self.scaler._found_inf_per_device(optimizer).values()
        has_stepped = not any(bool(flag) for flag in found)
        optimizer.zero_grad(set_to_none=True)
        self.stepped.append(optimizer)
        if not any(has_gradients(parameters_of(optimizer)) for optimizer in self.optimizers):
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
