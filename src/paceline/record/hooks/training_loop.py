"""Record the training loop of a script that does not use Paceline's API.

``torch_patches`` calls the methods of ``LoopRecorder`` around the outermost module's forward, every
backward, every optimizer step and every batch of a DataLoader.

    fetch  forward  (loss)  backward  step      a training iteration
    fetch  forward without gradient             an iteration of an evaluation
    fetch  teacher, forward  (loss) backward    a training iteration: a backward follows

Whether an iteration was an evaluation is known only at its end, so its event is written then.
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

MAX_NESTED_LOADERS = 8  # loaders that are iterated inside each other's loops
# Batches fetched before their backward. If there are more, the script only reads the data.
MAX_BATCHES_AHEAD = 16
DISCARDED = -1  # in place of the id of an iterator that no longer exists
# Forwards without gradient that are held until it is known whether a backward follows them.
MAX_HELD_FORWARDS = 64


class _Iteration:
    """One iteration of a loop over a DataLoader: from one fetch to the next."""

    __slots__ = (
        *("forwards", "is_training", "iterator", "iterator_start", "may_be_evaluation", "module"),
        *("samples", "start"),
    )

    def __init__(self, iterator: int, start: int, samples: int, iterator_start: int = 0) -> None:
        self.iterator = iterator  # id; 0 without a loader: from a forward to the optimizer's step
        self.iterator_start = iterator_start  # ns; 0 if unknown
        self.module = 0  # id of the first one called, without a loader
        self.start = start
        self.samples = samples
        self.may_be_evaluation = False  # a forward without gradient, or of a model in eval mode
        self.is_training = False
        self.forwards: list[tuple[int, int]] = []  # without gradient


class LoopRecorder:
    """The recorder of one process's training loop.

    Attributes:
        busy: Whether an operation runs that is recorded as a whole. Modules, backwards and loaders
            inside it are not recorded separately.
        stopped: Whether something else records the loop (``paceline.init``).
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.stopped = False
        self.reset()

    def reset(self) -> None:
        """Return to the initial state."""
        self.busy = False
        self._thread = threading.main_thread().ident
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._trained_parameters: set[int] = set()  # ids of first parameters of trained models
        self._last_model: Callable[[], nn.Module | None] = lambda: None  # trained
        self._running_module: nn.Module | None = None  # the outermost one
        self._loop_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._iterations: list[_Iteration] = []
        self._samples_ahead: list[int] = []  # samples of fetched, unused batches
        self._loaderless_evaluation = [0, 0]  # start and end (ns)
        self._forward_end = 0  # of a forward without its backward yet
        self._new_iterator = (0, 0)  # its id, and the start of its creation (ns)
        self._step_end = 0  # of the last step, until the next forward
        self._fetched_this_step = 0  # batches since the last step
        self._fetched_last_step = 0
        self._running_optimizer: Optimizer | None = None
        self._step_start = 0
        self._step_optimizer: weakref.ref[Optimizer] | None = None
        self._other_optimizer: weakref.ref[Optimizer] | None = None
        self._backwards = 0  # since the last counted step
        self._ever_backward = False

    def ignores_thread(self) -> bool:
        """Return whether the calling thread does not train, or something else records the loop."""
        return self.stopped or get_ident() != self._thread

    # Batches

    def fetch(self, iterator: Any, fetch: Callable[[Any], Any]) -> Any:
        """Fetch the next batch of a loader's iterator, and record its time and samples."""
        self.recorder.hook_calls += 1
        start = now()
        if self._loaderless_evaluation[0]:
            self._end_evaluation()
        self._forward_end = 0
        iterator_start = self._close_iterations(id(iterator), start)
        self.recorder.begin(State.INPUT, start)
        self.busy = True
        try:
            batch = fetch(iterator)
        finally:
            self.busy = False
            self.recorder.event(State.INPUT, start, now())
        if self._new_iterator[0]:
            if self._new_iterator[0] == id(iterator):
                start = iterator_start = self._new_iterator[1]
            self._new_iterator = (0, 0)
        self._iterations.append(_Iteration(id(iterator), start, _samples(batch), iterator_start))
        if len(self._iterations) > MAX_NESTED_LOADERS:
            del self._iterations[0]
        self._fetched_this_step += 1
        return batch

    def open(self, loader: Any, make: Callable[[Any], Any]) -> Any:
        """Make a loader's iterator and its workers, recorded as a wait for input."""
        start = now()
        self.recorder.begin(State.INPUT, start)
        self.busy = True
        try:
            iterator = make(loader)
        finally:
            self.busy = False
            self.recorder.event(State.INPUT, start, now())
        self._new_iterator = (id(iterator), start)
        if self._iterations and self._iterations[-1].iterator == id(iterator):
            self._close_iterations(id(iterator), start)
        for iteration in self._iterations:
            if iteration.iterator == id(iterator):  # a deleted one, whose id was reused
                iteration.iterator = DISCARDED
        return iterator

    def _close_iterations(self, iterator: int, end: int) -> int:
        """Close the current iterations of a loader and of the loaders inside its loop.

        Returns the time at which the loader's iterator was made (ns), or 0 if it is not known.
        """
        iterations, iterator_start = self._iterations, 0
        if iterations and (
            iterations[-1].iterator == iterator
            or any(iteration.iterator == iterator for iteration in iterations)
        ):
            while self._iterations:
                iteration = self._iterations.pop()
                if iteration.may_be_evaluation and not iteration.is_training:
                    self.recorder.event(State.VALIDATION, iteration.start, end)
                    self._samples_ahead = []
                elif iteration.samples:
                    self._samples_ahead.append(iteration.samples)
                if iteration.iterator == iterator:
                    iterator_start = iteration.iterator_start
                    break
        return iterator_start

    # The model

    def forward(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the outermost module and record its forward."""
        if self._last_model() is not module and not self._is_model(module):
            return call(module, *args, **kwargs)
        self.recorder.hook_calls += 1
        self.busy, self._running_module = True, module
        start = now()
        try:
            return call(module, *args, **kwargs)
        finally:
            end = now()
            if self._running_module is module:  # else it contains a training loop: see before_step
                self.busy, self._running_module = False, None
                if torch.is_grad_enabled():
                    self._record_training_forward(module, start, end, args, kwargs)
                else:
                    self._record_other_forward(module, start, end)

    def _is_model(self, module: nn.Module) -> bool:
        """Return whether the module is a model.

        Data transforms and loss functions have no parameters. A module that runs optimizer steps
        inside its forward contains the training loop.
        """
        if module in self._models:
            return True
        if next(module.parameters(), None) is None or module in self._loop_modules:
            return False
        self._models.add(module)
        return True

    def _record_training_forward(
        self, module: nn.Module, start: int, end: int, args: Any, kwargs: Any
    ) -> None:
        if self._loaderless_evaluation[0]:
            self._end_evaluation()
        self.recorder.event(State.FORWARD, start, end)
        self._forward_end = end
        if self._last_model() is not module:  # usually the same one
            self._last_model = weakref.ref(module)
            self._trained_parameters.add(id(next(module.parameters())))
        if not (self._fetched_this_step or self._fetched_last_step):
            self._record_loaderless_input(module, start, args or tuple(kwargs.values()))
        elif not self._iterations:
            self._iterations.append(_Iteration(0, start, 0))
        self._step_end = 0
        iteration = self._iterations[-1]
        if module.training:
            iteration.is_training = True
        else:
            iteration.may_be_evaluation = True

    def _record_loaderless_input(self, module: nn.Module, start: int, inputs: Any) -> None:
        """Record the input of a step in whose two last steps no DataLoader was used.

        The gap since the last step is the wait for the batch, and the model's first input has its
        samples.
        """
        if self._step_end:
            self.recorder.event(State.GAP, self._step_end, start)
        if not self._iterations:
            self._iterations.append(_Iteration(0, start, 0))
            self._iterations[-1].module = id(module)
        if self._iterations[-1].module == id(module) and inputs:
            self._iterations[-1].samples += _samples(inputs)

    def _record_other_forward(self, module: nn.Module, start: int, end: int) -> None:
        iteration = self._iterations[-1] if self._iterations else None
        if iteration is not None and iteration.iterator and not iteration.is_training:
            iteration.may_be_evaluation = True
            if len(iteration.forwards) < MAX_HELD_FORWARDS:
                iteration.forwards.append((start, end))
            else:
                iteration.forwards[-1] = (iteration.forwards[-1][0], end)
        elif not module.training and id(next(module.parameters())) in self._trained_parameters:
            self._loaderless_evaluation = [self._loaderless_evaluation[0] or start, end]
        else:
            self.recorder.event(State.FORWARD, start, end)

    def _end_evaluation(self) -> None:
        self.recorder.event(State.VALIDATION, *self._loaderless_evaluation)
        self._loaderless_evaluation = [0, 0]

    # Gradients

    def backward(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run autograd's engine and record the backward."""
        self.recorder.hook_calls += 1
        if self._loaderless_evaluation[0]:
            self._end_evaluation()
        start = now()
        if self._forward_end:
            self.recorder.event(State.LOSS, self._forward_end, start)
            self._forward_end = 0
        if self._iterations:
            self._assign_to_training(self._iterations[-1])
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
            else:  # autograd.grad: part of the loss, which may go on
                self._forward_end = end

    def _assign_to_training(self, iteration: _Iteration) -> None:
        """Count an iteration as training: its forwards without gradient were part of the step."""
        iteration.is_training = True
        self._close_earlier_evaluations(iteration)
        if iteration.forwards:
            for start, end in iteration.forwards:
                self.recorder.event(State.FORWARD, start, end)
            iteration.forwards.clear()
        if self._samples_ahead:
            if len(self._samples_ahead) <= MAX_BATCHES_AHEAD:
                self.recorder.samples += sum(self._samples_ahead)
            self._samples_ahead = []
        self.recorder.samples += iteration.samples
        iteration.samples = 0

    def _close_earlier_evaluations(self, iteration: _Iteration) -> None:
        """Record evaluations that ended without a last fetch.

        An evaluation that knew its last batch was over when the loader that now trains was made.
        Its iterator is deleted, and another one may have the same id.
        """
        while len(self._iterations) > 1:
            last = self._iterations[-2]
            evaluates = last.iterator and last.may_be_evaluation and not last.is_training
            if not evaluates or last.start >= iteration.iterator_start:
                break
            self.recorder.event(State.VALIDATION, last.start, iteration.iterator_start)
            del self._iterations[-2]

    # The optimizer

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        running = self._running_optimizer
        if self.stopped or (running is not None and running is not optimizer):
            return  # an optimizer inside another optimizer's step
        self._thread = get_ident()
        if self._running_module is not None:  # its forward contains the training loop
            self._loop_modules.add(self._running_module)
            self._models.discard(self._running_module)
            self.busy, self._running_module = False, None
        if self._loaderless_evaluation[0]:
            self._end_evaluation()
        self._running_optimizer = optimizer
        self._step_start = now()

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.stopped or self._running_optimizer is not optimizer:
            return
        self.recorder.hook_calls += 1
        self._running_optimizer = None
        self._forward_end = 0
        self.recorder.event(State.OPTIMIZER, self._step_start, now())
        if self._iterations and not self._iterations[-1].iterator:
            self._iterations.pop()  # a step ends an iteration without a loader
        if self._ends_job_step(optimizer):
            self._backwards = 0
            self.recorder.end_of_step()
            self._step_end = now()
            self._fetched_this_step, self._fetched_last_step = 0, self._fetched_this_step

    def _ends_job_step(self, optimizer: Optimizer) -> bool:
        """Return whether a step of the job ends with this optimizer's step.

        Some frameworks use one optimizer for each group of parameters, with one backward before all
        of them. If several optimizers alternate, the steps of the first one count, until another
        one steps twice without it.
        """
        if self._ever_backward and not self._backwards:
            return False
        counted = self._step_optimizer() if self._step_optimizer is not None else None
        other = self._other_optimizer() if self._other_optimizer is not None else None
        if counted is None or counted is optimizer or other is optimizer:
            self._step_optimizer, self._other_optimizer = weakref.ref(optimizer), None
            return True
        self._other_optimizer = weakref.ref(optimizer)
        return False

    def end(self) -> None:
        """Record the iterations that are still open; called at the end of the script."""
        if self._loaderless_evaluation[0]:
            self._end_evaluation()
        if self._iterations:
            iteration = self._iterations[-1]
            if iteration.may_be_evaluation and not iteration.is_training and iteration.iterator:
                self.recorder.event(State.VALIDATION, iteration.start, now())
        self._iterations.clear()


def _samples(batch: Any) -> int:
    """Return the number of samples in a batch; 0 if its type is unknown."""
    try:
        return samples_in(batch)
    except Exception:  # recording must never fail a script
        return 0
