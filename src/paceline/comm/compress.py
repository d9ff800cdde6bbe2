"""Gradient compression, as communication hooks of DDP.

The part of the gradients that a step does not send is added to the gradients of the next step
(error feedback): it is delayed, and not lost.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from ..knobs.apply import KnobResult
from ..knobs.ddp import hooked

FIRST = 4  # first steps without compression: DDP rebuilds its buckets after the first one


def powersgd(rank: int, turned: KnobResult) -> None:
    """Compress gradients with PyTorch's PowerSGD.

    A gradient of shape m x n is sent as two matrices of ``rank`` columns (Vogels, Karimireddy,
    Jaggi 2019, arXiv 1905.13727).
    """

    def make(replica: Any) -> tuple[Any, Callable[..., Any]]:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

        state = torchs.PowerSGDState(
            replica.process_group,
            matrix_approximation_rank=int(rank),
            start_powerSGD_iter=FIRST,
        )
        return state, torchs.powerSGD_hook

    hooked(turned, make)


def topk(share: float, turned: KnobResult) -> None:
    """Send only the share ``share`` of each bucket's elements with the largest absolute values."""

    def make(replica: Any) -> tuple[Any, Callable[..., Any]]:
        return TopK(share, replica.process_group), topk_hook

    hooked(turned, make)


class TopK:
    """State of top-k compression.

    Attributes:
        share: Share of a bucket's elements that is sent: the largest absolute values, as float32,
            each with its int32 index (Aji, Heafield 2017, arXiv 1704.05021).
        left: Part of the gradients that has not been sent yet, by bucket (Stich, Cordonnier, Jaggi
            2018, arXiv 1809.07599).
    """

    def __init__(self, share: float, group: dist.ProcessGroup) -> None:
        self.share, self.group = share, group
        self.left: dict[int, torch.Tensor] = {}


def topk_hook(state: TopK, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the mean over ranks of the elements that each rank sends.

    They are added in the order of ranks, so the result is bitwise identical on all ranks.
    """
    flat, size = bucket.buffer(), state.group.size()
    left = state.left.get(bucket.index())
    if left is not None and left.numel() == flat.numel():
        flat.add_(left)
    count = max(1, round(state.share * flat.numel()))
    _, where = flat.abs().topk(count, sorted=False)
    sent = torch.empty(2 * count, dtype=torch.int32, device=flat.device)
    sent[:count] = where
    sent[count:] = flat[where].float().view(torch.int32)
    left = state.left[bucket.index()] = flat.clone()
    left[where] = 0
    each = [torch.empty_like(sent) for _ in range(size)]
    gathered = dist.all_gather(each, sent, group=state.group, async_op=True).get_future()

    def summed(_: Any) -> torch.Tensor:
        flat.zero_()
        for one in each:
            values = one[count:].view(torch.float32).to(flat.dtype)
            flat.index_add_(0, one[:count].long(), values)
        return flat.div_(size)

    future: torch.futures.Future[torch.Tensor] = gathered.then(summed)
    return future
