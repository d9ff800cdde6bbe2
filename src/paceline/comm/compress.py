"""Gradient compression, as communication hooks of DDP.

The part of the gradients that a step does not send is added to the gradients of the next step
(error feedback): it is delayed, and not lost.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from ..knobs.knob import KnobResult
from ..knobs.model import hooked
from .shared.async_collectives import CompletedWork

# First steps without compression by PowerSGD, whose residuals belong to buckets: DDP rebuilds its
# buckets after the first one.
FIRST = 4
# Added to the norms that PowerSGD divides by, as all elements of a gradient may be 0.
EPSILON = 1e-8


def powersgd(rank: int, turned: KnobResult) -> None:
    """Compress gradients with PyTorch's PowerSGD.

    A gradient of shape m x n is sent as two matrices of ``rank`` columns (Vogels, Karimireddy,
    Jaggi 2019, arXiv 1905.13727).
    """

    def make(replica: Any) -> tuple[Any, Callable[..., Any]]:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

        group = replica.process_group
        on_nccl = replica.device.type == "cuda" and dist.get_backend(group) != "gloo"
        state = torchs.PowerSGDState(
            group if on_nccl else BlockingGroup(group),
            matrix_approximation_rank=int(rank),
            start_powerSGD_iter=FIRST,
            orthogonalization_epsilon=EPSILON,
        )
        return state, torchs.powerSGD_hook

    hooked(turned, make)


class BlockingGroup(dist.ProcessGroup):
    """A process group whose all-reduces have ended when they return.

    PyTorch's PowerSGD launches all-reduces in the callbacks of others, and waits for them there. On
    CPUs the threads that execute all-reduces also execute these callbacks: with several buckets all
    of them would wait, and ranks would launch all-reduces in different orders. After an all-reduce
    that has ended, callbacks run at once, in the thread of the backward.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # The stub has only the constructor with a store.
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group

    def allreduce(self, tensors: Any, *given: Any) -> dist.Work:
        self._group.allreduce(tensors, *given).wait()
        return CompletedWork(tensors)


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
        left: Part of each parameter's gradients that has not been sent yet, as a vector (Stich,
            Cordonnier, Jaggi 2018, arXiv 1809.07599). By parameter, as DDP moves parameters to
            other buckets after the first step.
    """

    def __init__(self, share: float, group: dist.ProcessGroup) -> None:
        self.share, self.group = share, group
        self.left: dict[torch.Tensor, torch.Tensor] = {}


def topk_hook(state: TopK, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the mean over ranks of the elements that each rank sends.

    They are added in the order of ranks, so the result is bitwise identical on all ranks.
    """
    flat, size = bucket.buffer(), state.group.size()
    parameters = bucket.parameters()
    each_numel = [parameter.numel() for parameter in parameters]
    for parameter, gradient in zip(parameters, flat.split(each_numel), strict=True):
        if parameter in state.left:
            gradient.add_(state.left[parameter])
    count = max(1, round(state.share * flat.numel()))
    _, where = flat.abs().topk(count, sorted=False)
    sent = torch.empty(2 * count, dtype=torch.int32, device=flat.device)
    sent[:count] = where
    values = flat[where].float()
    sent[count:] = values.view(torch.int32)
    left = flat.clone()
    left[where] -= values.to(flat.dtype)  # the rounding of float64
    left.nan_to_num_(0.0, 0.0, 0.0)  # else one overflow (torch.amp) would stay for ever
    state.left.update(zip(parameters, left.split(each_numel), strict=True))
    each = [torch.empty_like(sent) for _ in range(size)]
    gathered = dist.all_gather(each, sent, group=state.group, async_op=True).get_future()

    def summed(_: Any) -> torch.Tensor:
        flat.zero_()
        for sent_by_rank in each:
            values = sent_by_rank[count:].view(torch.float32).to(flat.dtype)
            flat.index_add_(0, sent_by_rank[:count].long(), values)
        return flat.div_(size)

    future: torch.futures.Future[torch.Tensor] = gathered.then(summed)
    return future
