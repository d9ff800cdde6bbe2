"""Record the phases of a training loop that uses ``paceline.init``."""

import contextlib
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..ring.recorder import Recorder, now
from ..ring.states import State
from .taps import parameters_of


class UncopiedHook:
    """A hook on a user's model or parameter that copies and pickles of it do not have.

    Its own copy accepts the same arguments and does nothing, and is of Python's library, so that a
    pickled model can be loaded without Paceline.
    """

    __slots__ = ("call",)
    __torch_unserializable__ = True  # torch does not warn that a pickled tensor has no hooks

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


def has_users_hooks(parameter: torch.Tensor) -> bool:
    """Return whether the script or a library, not Paceline, has a hook on a gradient."""
    later = getattr(parameter, "_post_accumulate_grad_hooks", None)
    every = [*(parameter._backward_hooks or {}).values(), *(later or {}).values()]
    return any(not isinstance(hook, UncopiedHook) for hook in every)


class PhaseRecorder:
    """The recorder of forward, loss, backward and optimizer step of one training loop.

    The time between the end of a forward and the start of its backward is the loss. A backward that
    was not announced with ``backward_starts`` (``loss.backward()``) lasts until the optimizer step.

    Args:
        release_loop: Ends the recording of the loop by the hooks of plain scripts, which record
            until ``begin``; None: there are no such hooks.
    """

    def __init__(self, recorder: Recorder, release_loop: Callable[[], None] | None = None) -> None:
        self.recorder = recorder
        self._release_loop = release_loop
        self._forward_start = 0
        self.forward_end = 0  # ns; 0: no forward is without its backward
        self._step_start = 0
        self._step_optimizer: Optimizer | None = None  # its steps are the job's steps
        self.is_in_loop = False  # the world has yielded a batch
        self._knows_optimizer = True  # from ``watch_optimizer``, and not from its first step
        self.known_steps = 0  # of optimizers given to ``watch_optimizer``
        self._hooked_ids: set[int] = set()
        self._models: list[nn.Module] = []
        self._has_begun = False
        if release_loop is None:
            self.begin()

    def begin(self) -> None:
        """Begin to record, with the world's first model, optimizer, batch or backward.

        If no optimizer is given to ``watch_optimizer``, the first one that steps is watched: one
        with a parameter of a watched model, if there are such models.
        """
        if self._has_begun:
            return
        self._has_begun = True
        if self._release_loop is not None:
            self._release_loop()
        thread, this = get_ident(), weakref.ref(self)

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            recorder = this()
            if recorder is not None and recorder._step_optimizer is None and get_ident() == thread:
                recorder._adopt(optimizer)

        register_optimizer_step_pre_hook(before_step)

    def _adopt(self, optimizer: Optimizer) -> None:
        known = {id(p) for model in self._models for p in model.parameters()}
        stepped = set(map(id, parameters_of(optimizer)))
        if known & stepped or (not self._models and self.is_in_loop):
            self.watch_optimizer(optimizer)
            self._knows_optimizer = False

    def watch_model(self, model: nn.Module) -> None:
        self.begin()
        self._models.append(model)
        model.register_forward_pre_hook(UncopiedHook(self._before_forward))
        model.register_forward_hook(UncopiedHook(self._after_forward))

    def watch_optimizer(self, optimizer: Optimizer, replaces: Optimizer | None = None) -> None:
        """Record an optimizer's steps; it may take the place of one that is no longer used."""
        self.begin()
        if id(optimizer) in self._hooked_ids:
            return
        self._hooked_ids.add(id(optimizer))
        if self._step_optimizer is None or self._step_optimizer is replaces:
            self._step_optimizer = optimizer
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def backward_starts(self) -> int:
        """Record the loss, and return the start of the backward (ns)."""
        self.begin()
        start = now()
        if self.forward_end:
            self.recorder.event(State.LOSS, self.forward_end, start)
            self.forward_end = 0
        return start

    def _before_forward(self, *_: Any) -> None:
        self._forward_start = now()

    def _after_forward(self, *_: Any) -> None:
        self.forward_end = now()
        self.recorder.event(State.FORWARD, self._forward_start, self.forward_end)

    def _before_step(self, *_: Any) -> None:
        self._step_start = now()
        self.recorder.training_thread = get_ident()
        if self.forward_end:
            self.recorder.event(State.BACKWARD, self.forward_end, self._step_start)
            self.forward_end = 0

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.recorder.event(State.OPTIMIZER, self._step_start, now())
        if optimizer is self._step_optimizer:
            self.known_steps += self._knows_optimizer
            self.recorder.end_of_step()
