"""Local SGD: ranks train independently for some steps and then average their parameters.

The gradients' part is PyTorch's ``post_localSGD_hook``. Its ``PeriodicModelAverager`` is not used:
it leaves out parameters without a gradient, so that ranks may average different ones, it replaces
the parameters' storage (and memory format), it mixes dtypes in one buffer, and it can't average
between its periods, as a checkpoint needs. Its counter also would have to count steps that loss
scaling skips: ranks skip different ones, as each has gradients of its own.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from ..knobs.knob import KnobResult
from ..knobs.model import hooked
from ..record.hooks.taps import SCALED_STEP, Function, on_step
from .gradients import parameters_of

FIRST = 4  # first gradient exchanges, before ranks train independently

_local_sgd: "dict[int, LocalSGD]" = {}  # by id of the replica, which each one keeps


def every(steps: int, turned: KnobResult) -> None:
    """Train with post-local SGD (Lin, Stich, Patel, Jaggi 2020, arXiv 1808.07217).

    After FIRST gradient exchanges, gradients are no longer synchronized. Parameters are averaged
    after every ``steps`` optimizer steps instead, and before a checkpoint or a validation of
    ``paceline.init``. Optimizer state (momentum) is averaged only before a checkpoint.
    """

    def make(replica: Any) -> tuple[Any, Callable[..., Any]]:
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torchs

        state = torchs.PostLocalSGDState(
            replica.process_group,
            None,
            start_localSGD_iter=FIRST,
            post_local_gradient_allreduce=False,
        )
        local = _local_sgd[id(replica)] = LocalSGD(int(steps), replica, state)
        on_step(after=local.after_step)
        SCALED_STEP.around(local.count_skipped_step)
        return state, torchs.post_localSGD_hook

    hooked(turned, make)


def local_sgd_of(model: Any) -> "LocalSGD | None":
    """Return the local SGD of a DistributedDataParallel model; None without the knob."""
    return _local_sgd.get(id(model))


class LocalSGD:
    """Post-local SGD of one model.

    Attributes:
        steps: Optimizer steps between two averages.
        replica: The DistributedDataParallel model.
        exchange: PyTorch's state of the communication hook; ``iter`` counts gradient exchanges.
        done: Number of optimizer steps since the last one with exchanged gradients; -1 before it.
            A step that loss scaling skips counts: the number is the same on all ranks.
        ranks_differ: Whether ranks have trained independently since their last average.
        states_differ: The same for the state of optimizers, since its last average.
    """

    def __init__(self, steps: int, replica: Any, exchange: Any) -> None:
        self.steps, self.replica, self.exchange = steps, replica, exchange
        self.done = -1
        self.ranks_differ = self.states_differ = False
        self._parameters = {id(parameter) for parameter in replica.parameters()}

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Count an optimizer step, and average the parameters when due.

        torch calls it after a step of any optimizer. Of several optimizers, only those whose first
        parameter belongs to the model count.
        """
        first = next(iter(parameters_of(optimizer)), None)
        if id(first) not in self._parameters or self.exchange.iter < FIRST:
            return
        self.done += 1
        self.ranks_differ = self.states_differ = self.done > 0
        if self.ranks_differ and self.done % self.steps == 0:
            self.average()

    def count_skipped_step(
        self, step: Function, scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        """Call the scaler's ``step``, and count a step that it skips as well."""
        before = self.done
        result = step(scaler, optimizer, *args, **kwargs)
        if self.done == before:
            self.after_step(optimizer)
        return result

    def average(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """Average the parameters over the ranks, and the state of ``optimizers``. Collective.

        Without effect on what is equal on all ranks already.
        """
        group = self.replica.process_group
        if self.ranks_differ:
            self.ranks_differ = False
            average(self.replica.parameters(), group)
        if not (optimizers and self.states_differ):
            return
        self.states_differ = False
        states = [state for optimizer in optimizers for state in self._states(optimizer)]
        count = torch.tensor([len(states), -len(states)], device=self.replica.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
        if int(count[0]) == -int(count[1]):  # a rank that has skipped all steps has no state yet
            average(states, group)

    def _states(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """Return the tensors of floating-point numbers in the state of the model's parameters."""
        return [
            value
            for parameter in parameters_of(optimizer)
            if id(parameter) in self._parameters
            for name, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and name != "step"
        ]


@torch.no_grad()
def average(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace each tensor by its mean over the ranks, with one all-reduce per dtype."""
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    for each in kinds.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in each]).div_(group.size())
        dist.all_reduce(flat, group=group)
        for tensor, mean in zip(each, flat.split([tensor.numel() for tensor in each]), strict=True):
            tensor.copy_(mean.view_as(tensor))
