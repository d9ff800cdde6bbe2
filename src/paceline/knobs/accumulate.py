"""Knob of gradient accumulation: synchronize gradients only in the last backward of a step.

The number of backwards of a step is assumed to be that of the previous step. If a step has fewer,
the missing gradient synchronization is done before the optimizer's step, and the knob is disabled
from then on. With loss scaling, a step begins where the scaler looks for infinite gradients: it
must find the same ones on all ranks, and may then skip the optimizer's step.
"""

from typing import Any

from ..record.hooks import taps
from ..record.ring.launcher_messages import notify
from .apply import KnobResult
from .ddp import before_forward


def locally(_: bool, turned: KnobResult) -> None:
    _Locally(turned).install()


class _Locally:
    def __init__(self, turned: KnobResult) -> None:
        self.turned = turned
        self.usual = 0  # forwards per replica in the previous step
        self.replicas: dict[int, tuple[Any, int]] = {}  # by id: replica, forwards in this step
        self.mine: set[int] = set()  # ids of replicas whose synchronization is disabled
        self.off = False

    def install(self) -> None:
        before_forward(self.forward)
        taps.on_step(before=self._step)
        for tap in (taps.UNSCALE, taps.SCALED_STEP):  # they look for infinite gradients
            tap.before(self._step)

    def forward(self, replica: Any) -> None:
        """Disable gradient synchronization of the next backward unless it is the step's last."""
        if not replica.require_backward_grad_sync and id(replica) not in self.mine:
            self.off = True
            self.turned.not_done("the script calls no_sync")
        count = self.replicas.get(id(replica), (replica, 0))[1] + 1
        self.replicas[id(replica)] = (replica, count)
        if self.off:
            return
        replica.require_backward_grad_sync = count >= self.usual
        (self.mine.discard if count >= self.usual else self.mine.add)(id(replica))

    def _step(self, *_: Any, **__: Any) -> None:
        """End the step's backwards; without effect if they have been ended already."""
        counts = {count for _, count in self.replicas.values()}
        if not counts:
            return
        behind = [replica for at, (replica, _) in self.replicas.items() if at in self.mine]
        for replica in behind:
            self._exchange(replica)
            replica.require_backward_grad_sync = True
        self.mine.clear()
        if behind:
            self.off = True
            notify(
                "warning: accumulate-locally: a step has fewer backwards than the one before; "
                "from now on DDP synchronizes gradients in each backward\n"
            )
        if len(counts) == 1 and not self.off:
            self.usual = counts.pop()
            if self.usual > 1:
                self.turned.done()
        self.replicas.clear()

    def _exchange(self, replica: Any) -> None:
        """Average the gradients over the ranks, as DDP's backward would have done."""
        import torch.distributed as dist

        for parameter in replica.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=replica.process_group)
                parameter.grad /= replica.process_group.size()
