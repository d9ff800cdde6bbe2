"""Hooks that note the training loop of a script that does not use Paceline's API.

``torch_patches`` calls the methods of ``LoopRecorder`` around the outermost module's forward, every
backward, every optimizer step and every batch of a DataLoader. They only write down what happened;
``loop.iterations.TrainingLoop`` decides what it was. The notes of a hook and the script's own call
are kept apart: the script's exceptions pass unchanged, and an exception in the notes is reported
once and switches that hook off.
"""

import sys
import threading
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..loop.iterations import TrainingLoop
from ..ring.recorder import Recorder, now
from ..ring.states import State
from .batch_size import fingerprint_of, samples_in
from .hook_failures import failed_hooks, noting, report_failure

MAX_FINGERPRINTS = 4  # of the first batches that are trained; the report compares ranks by them
_FETCH, _FORWARD, _BACKWARD = "the DataLoader", "the model's forward", "the backward"
_STEP = "the optimizer step"
_INPUT = int(State.INPUT)  # faster than the enum member
_in_backward, _is_tracing = torch._C._current_graph_task_id, torch._C._is_tracing
_is_grad_enabled = torch.is_grad_enabled


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
        self._thread = self.recorder.training_thread = threading.main_thread().ident or 0
        self._other_thread = 0  # that has run the last optimizer step
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._running_module: nn.Module | None = None  # the outermost one
        self._loop_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._running_optimizer: Callable[[], Optimizer | None] = _no_optimizer
        self._step_start = 0
        self._fingerprints: list[int] = []
        self._is_input = False  # the fingerprints are of a model's input, not of a loader's batch
        self._loop = TrainingLoop(
            self.recorder, _samples, _first_parameter, self._fingerprint, self._add_fingerprint
        )

    def ignores_thread(self) -> bool:
        """Return whether the calling thread does not train, or something else records the loop."""
        return self.stopped or get_ident() != self._thread

    # Batches

    def fetch(
        self, fetch: Callable[[Any], Any], iterator: Any, count: Callable[[Any], int] | None = None
    ) -> Any:
        """Fetch the next batch of a loader's iterator, and record its time and samples.

        count: returns the number of samples; None: of batches of torch.
        """
        if _FETCH in failed_hooks:
            return fetch(iterator)
        start, iterator_start = now(), 0
        try:
            self.recorder.hook_calls += 1
            iterator_start = self._loop.fetch_begins(id(iterator), start)
            self.recorder.begin(_INPUT, start)
        except Exception as error:
            report_failure(_FETCH, error)
            return fetch(iterator)
        self.busy = True
        try:
            batch = fetch(iterator)
        except BaseException as error:
            self.busy = False
            self.recorder.event(_INPUT, start, now())
            if isinstance(error, StopIteration):
                self._end_iterator(id(iterator), iterator_start)
            raise
        self.busy = False
        try:
            self.recorder.event(_INPUT, start, now())
            known = len(self._fingerprints) >= MAX_FINGERPRINTS
            fingerprint = 0 if known else self._fingerprint(batch)
            samples = (count or _samples)(batch)
            self._loop.fetched(id(iterator), start, iterator_start, samples, fingerprint)
        except Exception as error:
            report_failure(_FETCH, error)
        return batch

    @noting(_FETCH)
    def _end_iterator(self, iterator: int, iterator_start: int) -> None:
        self._loop.exhausted(iterator, iterator_start)

    def open(self, make: Callable[[Any], Any], loader: Any) -> Any:
        """Make a loader's iterator and its workers, recorded as a wait for input."""
        start = now()
        self.recorder.begin(_INPUT, start)
        self.busy = True
        try:
            iterator = make(loader)
        finally:
            self.busy = False
            self.recorder.event(_INPUT, start, now())
        try:
            self._loop.iterator_made(id(iterator), start)
        except Exception as error:
            report_failure(_FETCH, error)
        return iterator

    def _fingerprint(self, batch: Any) -> int:
        """Return the checksum of a batch; 0 if it has none, or is not one of the first."""
        if len(self._fingerprints) >= MAX_FINGERPRINTS:
            return 0
        try:
            with torch._C.DisableTorchFunction():
                return fingerprint_of(batch)
        except Exception:  # of a type that is not known
            return 0

    def _add_fingerprint(self, fingerprint: int, is_input: bool) -> None:
        """Store the checksum of a batch that is trained. is_input: A model's input."""
        if len(self._fingerprints) < MAX_FINGERPRINTS:
            self._fingerprints.append(fingerprint)
            self._is_input |= is_input
            if len(self._fingerprints) == MAX_FINGERPRINTS:
                self._write_fingerprints()

    def _write_fingerprints(self) -> None:
        name = "inputs" if self._is_input else "batches"
        self.recorder.update_header(**{name: self._fingerprints})

    # The model

    def forward(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the outermost module and record its forward."""
        if self._loop.last_model() is not module and not self._is_model(module):
            return call(module, *args, **kwargs)
        if _FORWARD in failed_hooks or _is_tracing():
            return call(module, *args, **kwargs)
        self.busy, self._running_module = True, module
        start = now()
        try:
            return call(module, *args, **kwargs)
        finally:
            end = now()
            if self._running_module is module:  # else it contains a training loop: see before_step
                self.busy, self._running_module = False, None
                try:
                    self.recorder.hook_calls += 1
                    if _is_grad_enabled():
                        inputs = args or tuple(kwargs.values())
                        self._loop.training_forward(module, module.training, start, end, inputs)
                    else:
                        self._loop.other_forward(module, module.training, start, end)
                except Exception as error:
                    report_failure(_FORWARD, error)

    def _is_model(self, module: nn.Module) -> bool:
        """Return whether the module is a model.

        Data transforms and loss functions have no parameters. A module that runs optimizer steps
        inside its forward contains the training loop.
        """
        try:
            if module in self._models:
                return True
            if not _first_parameter(module) or module in self._loop_modules:
                return False
            self._models.add(module)
        except Exception as error:  # a module with methods or a hash of its own
            report_failure(_FORWARD, error)
            return False
        return True

    # Gradients

    def backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run autograd's engine and record the backward."""
        if _BACKWARD in failed_hooks:
            return run(*args, **kwargs)
        start = now()
        try:
            self.recorder.hook_calls += 1
            self._loop.backward_begins(start)
        except Exception as error:
            report_failure(_BACKWARD, error)
        self.busy = is_failing = True
        try:
            result = run(*args, **kwargs)
            is_failing = False
            return result
        finally:
            self.busy = False
            try:
                self._loop.backward_ends(start, now(), kwargs.get("accumulate_grad", True))
                if is_failing:
                    self.recorder.backward_failed()
            except Exception as error:
                report_failure(_BACKWARD, error)

    # The optimizer

    @noting(_STEP)
    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        thread = get_ident()
        if self.stopped or (thread != self._thread and not self._takes_over(thread)):
            return
        running = self._running_optimizer()
        if running is not None and running is not optimizer and is_stepping(running):
            return  # an optimizer inside another optimizer's step
        if self._running_module is not None:  # its forward contains the training loop
            self._loop_modules.add(self._running_module)
            self._models.discard(self._running_module)
            self.busy, self._running_module = False, None
        self._other_thread = 0
        self._running_optimizer = weakref.ref(optimizer)
        self._step_start = now()

    def _takes_over(self, thread: int) -> bool:
        """Return whether an optimizer step in another thread is one of the training.

        The thread takes over with its second step in a row, or before the first step. A step inside
        a backward may be in a thread of autograd's engine.
        """
        if _in_backward() != -1:
            return True
        if self.recorder.step and self._other_thread != thread:
            self._other_thread = thread
            return False
        self._thread = self.recorder.training_thread = thread
        return True

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.stopped or self._running_optimizer() is not optimizer or _STEP in failed_hooks:
            return
        try:
            self.recorder.hook_calls += 1
            self._running_optimizer = _no_optimizer
            skipped = "found_inf" in optimizer.__dict__ and _was_skipped(optimizer)
            if not self._loop.step(optimizer, self._step_start, now(), skipped):
                return
        except Exception as error:
            report_failure(_STEP, error)
            return
        self.recorder.end_of_step()  # may end an experiment, and so the process
        self._loop.step_end = now()

    def whole_step(self, optimizer: Any, call: Callable[[], Any]) -> Any:
        """Make a step of a library that computes it as a whole, recorded as a backward.

        Not as a forward: gradients are exchanged in it, which are no activations.
        """
        start, self.busy = now(), True
        self.recorder.begin(int(State.BACKWARD), start)
        try:
            result = call()
        finally:
            self.busy, end = False, now()
        try:
            self.recorder.hook_calls += 1
            self._loop.backward_begins(start)
            self._loop.backward_ends(start, end, True)
            is_counted = self._loop.step(optimizer, end, end)
        except Exception as error:
            report_failure(_BACKWARD, error)
            return result
        if is_counted:
            self.recorder.end_of_step()  # may end an experiment, and so the process
            self._loop.step_end = now()
        return result

    def end(self) -> None:
        """Record the iterations that are still open; called at the end of the script."""
        self._loop.end(now())
        if 0 < len(self._fingerprints) < MAX_FINGERPRINTS:
            self._write_fingerprints()


def _no_optimizer() -> None:
    return None


def is_stepping(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's step is on this thread's stack.

    It is not if the step has raised an exception, which ends it without its hooks.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        is_step = frame.f_code.co_name in ("wrapper", "step")
        if is_step and frame.f_locals.get("self") is optimizer:
            return True
    return False


def _was_skipped(optimizer: Optimizer) -> bool:
    """Return whether a fused optimizer skipped its step, because a gradient was infinite.

    The gradient scaler tells it to such an optimizer in a tensor. On a GPU its value is not known
    without waiting for the device, so the step counts.
    """
    found: Any = optimizer.__dict__["found_inf"]
    if not isinstance(found, torch.Tensor) or found.device.type != "cpu":
        return False
    return bool(found)


def _first_parameter(module: Any) -> int:
    """Return the id of the module's first parameter; 0 if it has none."""
    try:
        parameter = next(nn.Module.parameters(module), None)
    except Exception:  # e.g. a module whose constructor has not run yet
        return 0
    return 0 if parameter is None else id(parameter)


def _samples(batch: Any) -> int:
    """Return the number of samples in a batch; 0 if its type is unknown."""
    try:
        with torch._C.DisableTorchFunction():
            return samples_in(batch)
    except Exception:
        return 0
