"""Observe loss functions: the value of the last one before a backward."""

import functools
from typing import Any

import torch

from ...hooks.taps import Tap
from ..observation import Observation
from .models import Model

_HOOK = "the loss functions"
# Functions of torch.nn.functional, each with whether a class index stands for a target.
LOSSES = {
    **dict.fromkeys(("cross_entropy", "nll_loss", "multi_margin_loss"), True),
    **dict.fromkeys(
        (
            *("binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss"),
            *("smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss", "gaussian_nll_loss"),
            *("ctc_loss", "hinge_embedding_loss", "margin_ranking_loss", "soft_margin_loss"),
            *("multilabel_margin_loss", "multilabel_soft_margin_loss", "cosine_embedding_loss"),
            *("triplet_margin_loss", "linear_cross_entropy"),
        ),
        False,
    ),
}


class Losses:
    """The loss functions of this process.

    Args:
        observation: Receives the values.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation

    def install(self) -> None:
        """Subscribe to the functions; the loss modules of torch call them."""
        for name, has_indices in LOSSES.items():
            note = functools.partial(self._note, has_indices)
            tap = Tap("torch.nn.functional", name, is_optional=True, is_traced=True)
            tap.wrap(self._observation.outermost(_HOOK, after=note))

    def _note(self, has_indices: bool, value: Any, *args: Any, **options: Any) -> None:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return
        observation = self._observation
        target: Any = options.get("target", args[1] if len(args) > 1 else None)
        elements, class_weight = target.numel() if isinstance(target, torch.Tensor) else 0, 0.0
        if has_indices and elements and not target.is_floating_point():
            counted = target[target != options.get("ignore_index", -100)]
            elements = counted.numel()
            weight: Any = options.get("weight", args[2] if len(args) > 2 else None)
            if isinstance(weight, torch.Tensor) and weight.ndim == 1:
                class_weight = float(weight.detach()[counted].sum())
        observation.loss = float(value.detach().sum()) if value.numel() else None
        observation.reduction = str(options.get("reduction", "mean"))
        observation.elements, observation.class_weight = elements, class_weight

    def note_output(self, model: Model, output: Any) -> None:
        """Note the attribute ``loss`` of a model's output."""
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
            self._observation.loss = float(loss.detach())
