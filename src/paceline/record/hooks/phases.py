"""Hooks that every training loop has: the outermost module's forward, the optimizer's step."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..ring.recorder import Recorder, now
from ..ring.states import State


class PhaseRecorder:
    """Records forward, loss, backward and optimizer of one training loop.

    What lies between a forward's end and its backward's start is the loss. A backward that
    nobody announced (``loss.backward()``) reaches to the optimizer's step.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._forward_start = 0
        self._forward_end = 0  # 0: no forward waits for its backward
        self._step_start = 0
        self._counted: Optimizer | None = None  # the optimizer whose steps are the job's steps
        self._hooked: set[int] = set()

    def watch_model(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward)

    def watch_optimizer(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._hooked:
            return
        self._hooked.add(id(optimizer))
        self._counted = self._counted or optimizer
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def backward_starts(self) -> int:
        """Close the loss; the start of the backward."""
        start = now()
        if self._forward_end:
            self.recorder.event(State.LOSS, self._forward_end, start)
            self._forward_end = 0
        return start

    def _before_forward(self, *_: Any) -> None:
        self._forward_start = now()

    def _after_forward(self, *_: Any) -> None:
        self._forward_end = now()
        self.recorder.event(State.FORWARD, self._forward_start, self._forward_end)

    def _before_step(self, *_: Any) -> None:
        self._step_start = now()
        if self._forward_end:
            self.recorder.event(State.BACKWARD, self._forward_end, self._step_start)
            self._forward_end = 0

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.recorder.event(State.OPTIMIZER, self._step_start, now())
        if optimizer is self._counted:
            self.recorder.end_of_step()
