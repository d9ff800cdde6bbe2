"""Clipping by the norm of the whole gradient, of which ranks may hold shards."""

from collections.abc import Sequence

import torch
from torch import nn

from ..optim.whole_norms import holds_shards, local_part, whole_norms


def clip_gradients(parameters: Sequence[torch.Tensor], limit: float) -> None:
    """Scale the gradients of all parameters together, so that their L2 norm is at most ``limit``.

    PyTorch's clip_grad_norm_ does so for gradients that are all whole. It can't mix whole and
    sharded ones, nor shards of different groups of ranks, and runs a collective for each dtype.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not holds_shards(gradients):
        nn.utils.clip_grad_norm_(parameters, limit)
        return
    total = whole_norms(gradients).square().sum().sqrt()
    factor = (limit / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        part = local_part(gradient)
        part.mul_(factor.to(part.device, part.dtype))
