"""Clipping by the norm of the whole gradient, of which ranks may hold shards."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..comm.group_device import exchangeable
from .sharded.registry import local_part, shard_group


def clip_gradients(parameters: Sequence[torch.Tensor], limit: float) -> None:
    """Scale the gradients of all parameters together, so that their L2 norm is at most ``limit``.

    PyTorch's clip_grad_norm_ does so for gradients that are all whole. It can't mix whole and
    sharded ones, nor shards of different groups of ranks, and runs a collective for each dtype.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    groups = [shard_group(gradient) for gradient in gradients]
    if not any(group is not None for group in groups):
        nn.utils.clip_grad_norm_(parameters, limit)
        return
    total = torch.zeros((), dtype=torch.float64, device=local_part(gradients[0]).device)
    for group in dict.fromkeys(groups):
        own = [local_part(g) for g, of in zip(gradients, groups, strict=True) if of is group]
        squares = torch.stack([n.double() for n in torch._foreach_norm(own)]).square().sum()
        if group is not None:
            squares = exchangeable(squares, group)
            dist.all_reduce(squares, group=group)
        total += squares.to(total.device)
    factor = (limit / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        part = local_part(gradient)
        part.mul_(factor.to(part.device, part.dtype))
