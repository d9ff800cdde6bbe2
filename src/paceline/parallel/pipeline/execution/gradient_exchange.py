"""Gradients of a stage after the last micro-batch: summed over tied copies, averaged over replicas.

One all-reduce of a flat tensor carries many gradients, and for each of them whether the rank has
one: a parameter that no rank has used keeps no gradient.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

BUCKET_BYTES = 25 << 20


def reduce_gradients(parameters: Sequence[nn.Parameter], group: Any, divisor: int) -> None:
    """Replace gradients by their sum over the ranks of a group, divided by a number. Collective."""
    for bucket in _buckets(parameters):
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


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters of one dtype and device with at most BUCKET_BYTES, if there are several."""
    kinds: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.requires_grad:
            kinds[parameter.dtype, parameter.device].append(parameter)
    for of_kind in kinds.values():
        bucket: list[nn.Parameter] = []
        for parameter in of_kind:
            if bucket and sum(p.nbytes for p in bucket) + parameter.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(parameter)
        yield bucket
