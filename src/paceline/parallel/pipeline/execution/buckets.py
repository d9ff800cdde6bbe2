"""Tensors that are exchanged together, and the gradients of a stage."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

BUCKET_BYTES = 25 << 20


class Exchanged(Protocol):
    """What a bucket is made of."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def nbytes(self) -> int: ...


One = TypeVar("One", bound=Exchanged)


def buckets(tensors: Iterable[One]) -> Iterator[list[One]]:
    """Yield tensors of one dtype and device, of at most BUCKET_BYTES if there are several."""
    kinds: dict[tuple[torch.dtype, torch.device], list[One]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.dtype, tensor.device].append(tensor)
    for of_kind in kinds.values():
        bucket: list[One] = []
        for one in of_kind:
            if bucket and sum(each.nbytes for each in bucket) + one.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(one)
        yield bucket


def reduce_gradients(parameters: Sequence[nn.Parameter], group: Any, divisor: int) -> None:
    """Replace gradients by their sum over the ranks of a group, divided by a number. Collective.

    After the last micro-batch they are summed over tied copies, and averaged over replicas. One
    all-reduce of a flat tensor carries many gradients, and for each of them whether the rank has
    one: a parameter that no rank has used keeps no gradient.
    """
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
