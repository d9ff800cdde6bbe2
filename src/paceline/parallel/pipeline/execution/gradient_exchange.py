"""Gradients of a stage after the last micro-batch: summed over tied copies, averaged over replicas.

One all-reduce of a flat tensor carries many gradients, and for each of them whether the rank has
one: a parameter that no rank has used keeps no gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .buckets import buckets


def reduce_gradients(parameters: Sequence[nn.Parameter], group: Any, divisor: int) -> None:
    """Replace gradients by their sum over the ranks of a group, divided by a number. Collective."""
    for bucket in buckets(p for p in parameters if p.requires_grad):
        first = bucket[0]
        has = torch.tensor([p.grad is not None for p in bucket], device=first.device)
        each = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket]
        flat = torch.cat([has.to(first.dtype), *(g.reshape(-1) for g in each)])
        dist.all_reduce(flat, group=group)
        counts, rest = flat[: len(bucket)], flat[len(bucket) :]
        rest /= divisor
        sizes = [p.numel() for p in bucket]
        for parameter, count, part in zip(bucket, counts.tolist(), rest.split(sizes), strict=True):
            if not count:
                continue
            if parameter.grad is None:
                parameter.grad = part.view_as(parameter).clone()
            else:
                parameter.grad.copy_(part.view_as(parameter))
