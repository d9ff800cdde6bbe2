"""Local SGD: ranks train independently for some steps and then average their parameters."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..knobs.apply import KnobResult
from ..knobs.ddp import hooked

FIRST = 4  # first steps, with gradient synchronization


def every(steps: int, turned: KnobResult) -> None:
    """Train with post-local SGD (Lin, Stich, Patel, Jaggi 2020, arXiv 1808.07217).

    After FIRST optimizer steps, gradients are no longer synchronized. Parameters are averaged after
    every ``steps`` optimizer steps instead. Optimizer state (momentum) is not averaged.
    """

    def make(replica: Any) -> tuple[Any, Callable[..., Any]]:
        state = Local(int(steps), replica)
        register_optimizer_step_post_hook(state.stepped)
        return state, local_hook

    hooked(turned, make)


class Local:
    """State of post-local SGD.

    Attributes:
        steps: Optimizer steps between two averages.
        done: Number of completed optimizer steps.
        own: Python ids of the model's parameters.
    """

    def __init__(self, steps: int, replica: Any) -> None:
        self.steps, self.replica, self.done = steps, replica, 0
        self.own = {id(parameter) for parameter in replica.parameters()}

    def stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Count an optimizer step, and average the parameters when due.

        torch calls it after a step of any optimizer. Of several optimizers, only those whose first
        parameter belongs to the model count.
        """
        groups = optimizer.param_groups
        first = next((one for group in groups for one in group["params"]), None)
        if id(first) not in self.own:
            return
        self.done += 1
        if self.done > FIRST and (self.done - FIRST) % self.steps == 0:
            average(self.replica.parameters(), self.replica.process_group)


def local_hook(state: Local, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the mean gradients over ranks in the first steps, then this rank's gradients."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    if state.done < FIRST:
        return allreduce_hook(state.replica.process_group, bucket)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@torch.no_grad()
def average(parameters: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace each parameter by its mean over the ranks, with one all-reduce per dtype."""
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for one in parameters:
        kinds.setdefault(one.dtype, []).append(one)
    for each in kinds.values():
        flat = torch.cat([one.reshape(-1) for one in each]).div_(group.size())
        dist.all_reduce(flat, group=group)
        for one, mean in zip(each, flat.split([one.numel() for one in each]), strict=True):
            one.copy_(mean.view_as(one))
