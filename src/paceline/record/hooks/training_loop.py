"""What the seams of any training loop say, made into events.

A script knows nothing of this. ``patches`` calls the methods here around the outermost module's
forward, every backward, every optimizer step and every batch of a DataLoader.

    fetch  forward  (loss)  backward  step      a training iteration
    fetch  forward without gradient             an iteration of an evaluation
    fetch  teacher, forward  (loss) backward    no evaluation: a backward follows

Whether an iteration was an evaluation is known at its end, so its event is written then.
"""

import threading
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..ring.recorder import Recorder, now
from ..ring.states import State
from .batch_size import samples_in

MAX_NESTED_LOADERS = 8  # loaders inside each other's loops that are told apart
MAX_BATCHES_AHEAD = (
    16  # batches fetched before their backward; with more the data is only being read
)
DISCARDED = -1  # an iterator that no longer is
MAX_HELD_FORWARDS = 64  # forwards without gradient that are held until it is known what they were


class _Iteration:
    """One turn of a loop over a DataLoader, from asking for its batch to asking for the next."""

    __slots__ = ("forwards", "iterator", "module", "opened", "quiet", "samples", "start", "trains")

    def __init__(self, iterator: int, start: int, samples: int, opened: int = 0) -> None:
        self.iterator = iterator  # 0: no loader's, from a forward to the optimizer's step
        self.opened = opened  # when that iterator was made, where that is known
        self.module = 0  # the first one called, where there is no loader
        self.start = start
        self.samples = samples
        self.quiet = False  # a forward without gradient, or of a model in eval mode
        self.trains = False
        self.forwards: list[tuple[int, int]] = []  # without gradient


class LoopRecorder:
    """Records one process's training loop. ``busy``: inside of something that is recorded as a
    whole, so that modules, backwards and loaders inside it are not recorded by themselves."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.stopped = False  # somebody else records the loop
        self.reset()

    def reset(self) -> None:
        """Forget what was seen so far."""
        self.busy = False
        self._thread = threading.main_thread().ident
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._trained: set[int] = set()  # first parameters of models that had a gradient
        self._newest: Callable[[], nn.Module | None] = lambda: None  # that had a gradient
        self._inside: nn.Module | None = None  # the outermost module that runs
        self._drivers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._iterations: list[_Iteration] = []
        self._ahead: list[int] = []  # samples of batches that were fetched before they are used
        self._evaluation = [0, 0]  # start and end of forwards outside of any loader's loop
        self._forward_end = 0  # of a forward that waits for its backward
        self._opened = (0, 0)  # an iterator that was just made, and when that began
        self._step_end = 0  # of the last step, until its next forward
        self._fetched = 0  # batches since the last step, and in it
        self._fetched_before = 0
        self._stepping: Optimizer | None = None
        self._step_start = 0
        self._counted: weakref.ref[Optimizer] | None = None
        self._other: weakref.ref[Optimizer] | None = None
        self._backwards = 0  # since the last counted step
        self._ever_backward = False

    def elsewhere(self) -> bool:
        """Whether the calling thread is not the one that trains, or all is recorded already."""
        return self.stopped or get_ident() != self._thread

    # batches

    def fetch(self, iterator: Any, fetch: Callable[[Any], Any]) -> Any:
        """Ask a loader's iterator for its next batch; time and samples."""
        self.recorder.hook_calls += 1
        start = now()
        if self._evaluation[0]:
            self._end_evaluation()
        self._forward_end = 0
        opened = self._ask(id(iterator), start)
        self.recorder.begin(State.INPUT, start)
        self.busy = True
        try:
            batch = fetch(iterator)
        finally:
            self.busy = False
            self.recorder.event(State.INPUT, start, now())
        if self._opened[0]:
            if self._opened[0] == id(iterator):
                start = opened = self._opened[1]
            self._opened = (0, 0)
        self._iterations.append(_Iteration(id(iterator), start, _samples(batch), opened))
        if len(self._iterations) > MAX_NESTED_LOADERS:
            del self._iterations[0]
        self._fetched += 1
        return batch

    def open(self, loader: Any, make: Callable[[Any], Any]) -> Any:
        """Make a loader's iterator, its workers too: that is waiting for input as well."""
        start = now()
        self.recorder.begin(State.INPUT, start)
        self.busy = True
        try:
            iterator = make(loader)
        finally:
            self.busy = False
            self.recorder.event(State.INPUT, start, now())
        self._opened = (id(iterator), start)
        if self._iterations and self._iterations[-1].iterator == id(iterator):
            self._ask(id(iterator), start)
        for turn in self._iterations:
            if turn.iterator == id(iterator):  # the one that had this address is gone
                turn.iterator = DISCARDED
        return iterator

    def _ask(self, iterator: int, at: int) -> int:
        """The iteration that this loader was in is over, and those of loaders inside it. When
        the loader's iterator was made, 0 where that is not known."""
        turns, opened = self._iterations, 0
        if turns and (
            turns[-1].iterator == iterator or any(turn.iterator == iterator for turn in turns)
        ):
            while self._iterations:
                turn = self._iterations.pop()
                if turn.quiet and not turn.trains:
                    self.recorder.event(State.VALIDATION, turn.start, at)
                    self._ahead = []
                elif turn.samples:
                    self._ahead.append(turn.samples)
                if turn.iterator == iterator:
                    opened = turn.opened
                    break
        return opened

    # the model

    def forward(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the outermost module."""
        if self._newest() is not module and not self._is_model(module):
            return call(module, *args, **kwargs)
        self.recorder.hook_calls += 1
        self.busy, self._inside = True, module
        start = now()
        try:
            return call(module, *args, **kwargs)
        finally:
            end = now()
            if self._inside is module:  # else it has trained: see before_step
                self.busy, self._inside = False, None
                if torch.is_grad_enabled():
                    self._with_gradient(module, start, end, args, kwargs)
                else:
                    self._without_gradient(module, start, end)

    def _is_model(self, module: nn.Module) -> bool:
        """A transform of data or a loss function has no parameters; what trains inside its
        forward is a loop and no model."""
        if module in self._models:
            return True
        if next(module.parameters(), None) is None or module in self._drivers:
            return False
        self._models.add(module)
        return True

    def _with_gradient(
        self, module: nn.Module, start: int, end: int, args: Any, kwargs: Any
    ) -> None:
        if self._evaluation[0]:
            self._end_evaluation()
        self.recorder.event(State.FORWARD, start, end)
        self._forward_end = end
        if self._newest() is not module:  # the same one, mostly
            self._newest = weakref.ref(module)
            self._trained.add(id(next(module.parameters())))
        if not (self._fetched or self._fetched_before):
            self._loaderless(module, start, args or tuple(kwargs.values()))
        elif not self._iterations:
            self._iterations.append(_Iteration(0, start, 0))
        self._step_end = 0
        turn = self._iterations[-1]
        if module.training:
            turn.trains = True
        else:
            turn.quiet = True

    def _loaderless(self, module: nn.Module, start: int, inputs: Any) -> None:
        """No DataLoader has been asked since the step before the last: the gap since it shows
        the wait for the batch, and the model's first input its samples."""
        if self._step_end:
            self.recorder.event(State.GAP, self._step_end, start)
        if not self._iterations:
            self._iterations.append(_Iteration(0, start, 0))
            self._iterations[-1].module = id(module)
        if self._iterations[-1].module == id(module) and inputs:
            self._iterations[-1].samples += _samples(inputs)

    def _without_gradient(self, module: nn.Module, start: int, end: int) -> None:
        turn = self._iterations[-1] if self._iterations else None
        if turn is not None and turn.iterator and not turn.trains:
            turn.quiet = True
            if len(turn.forwards) < MAX_HELD_FORWARDS:
                turn.forwards.append((start, end))
            else:
                turn.forwards[-1] = (turn.forwards[-1][0], end)
        elif not module.training and id(next(module.parameters())) in self._trained:
            self._evaluation = [self._evaluation[0] or start, end]
        else:
            self.recorder.event(State.FORWARD, start, end)

    def _end_evaluation(self) -> None:
        self.recorder.event(State.VALIDATION, *self._evaluation)
        self._evaluation = [0, 0]

    # gradients

    def backward(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run autograd's engine."""
        self.recorder.hook_calls += 1
        if self._evaluation[0]:
            self._end_evaluation()
        start = now()
        if self._forward_end:
            self.recorder.event(State.LOSS, self._forward_end, start)
            self._forward_end = 0
        if self._iterations:
            self._trains(self._iterations[-1])
        self.busy = True
        try:
            return run(*args, **kwargs)
        finally:
            self.busy = False
            end = now()
            self.recorder.event(State.BACKWARD, start, end)
            if kwargs.get("accumulate_grad", True):
                self._backwards += 1
                self._ever_backward = True
            else:  # autograd.grad: a part of the loss, and more of it may follow
                self._forward_end = end

    def _trains(self, turn: _Iteration) -> None:
        """A backward came: what ran without gradient before it was part of the step."""
        turn.trains = True
        self._end_before(turn)
        if turn.forwards:
            for start, end in turn.forwards:
                self.recorder.event(State.FORWARD, start, end)
            turn.forwards.clear()
        if self._ahead:
            if len(self._ahead) <= MAX_BATCHES_AHEAD:
                self.recorder.samples += sum(self._ahead)
            self._ahead = []
        self.recorder.samples += turn.samples
        turn.samples = 0

    def _end_before(self, turn: _Iteration) -> None:
        """An evaluation that knew its last batch and asked for no other was over when the loader
        that trains now was made. Its iterator is gone, and another may have its address."""
        while len(self._iterations) > 1:
            last = self._iterations[-2]
            evaluates = last.iterator and last.quiet and not last.trains
            if not evaluates or last.start >= turn.opened:
                break
            self.recorder.event(State.VALIDATION, last.start, turn.opened)
            del self._iterations[-2]

    # the optimizer

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.stopped or (self._stepping is not None and self._stepping is not optimizer):
            return  # an optimizer inside another one's step
        self._thread = get_ident()
        if self._inside is not None:  # its forward is a training loop
            self._drivers.add(self._inside)
            self._models.discard(self._inside)
            self.busy, self._inside = False, None
        if self._evaluation[0]:
            self._end_evaluation()
        self._stepping = optimizer
        self._step_start = now()

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.stopped or self._stepping is not optimizer:
            return
        self.recorder.hook_calls += 1
        self._stepping = None
        self._forward_end = 0
        self.recorder.event(State.OPTIMIZER, self._step_start, now())
        if self._iterations and not self._iterations[-1].iterator:
            self._iterations.pop()  # a step ends an iteration that no loader began
        if self._counts(optimizer):
            self._backwards = 0
            self.recorder.end_of_step()
            self._step_end = now()
            self._fetched, self._fetched_before = 0, self._fetched

    def _counts(self, optimizer: Optimizer) -> bool:
        """Whether a step of the job ends here. Engines step one optimizer a group of parameters,
        with one backward before them all; where several optimizers train in turns, the first
        one's steps count, until another one steps twice without it."""
        if self._ever_backward and not self._backwards:
            return False
        counted = self._counted() if self._counted is not None else None
        other = self._other() if self._other is not None else None
        if counted is None or counted is optimizer or other is optimizer:
            self._counted, self._other = weakref.ref(optimizer), None
            return True
        self._other = weakref.ref(optimizer)
        return False

    def end(self) -> None:
        """The script is at its end: what still waited for its kind gets it."""
        if self._evaluation[0]:
            self._end_evaluation()
        if self._iterations:
            turn = self._iterations[-1]
            if turn.quiet and not turn.trains and turn.iterator:
                self.recorder.event(State.VALIDATION, turn.start, now())
        self._iterations.clear()


def _samples(batch: Any) -> int:
    """Samples in whatever a script calls a batch; 0 where it can't be looked into."""
    try:
        return samples_in(batch)
    except Exception:  # recording never fails a script
        return 0
