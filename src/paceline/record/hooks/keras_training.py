"""Record scripts that train with ``keras.Model.fit``, with the TensorFlow or the PyTorch backend,
and TensorFlow's own training loops.

With PyTorch, forward, backward, optimizer step and batches are those of torch; Keras' models and
optimizers are no modules and optimizers that torch calls, so they are patched here. TensorFlow
computes a step as a whole: it is recorded as one backward, with the waits for collectives inside.
Its batches are fetched by a call of their own, and given to the same compiled step.

In a loop without ``fit``, a call of a ``tf.function`` is a step if an optimizer of Keras was
applied while TensorFlow traced it. An optimizer that is applied outside of functions ends a step.
"""

import sys
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch

from ..ring.recorder import now
from ..ring.states import State
from .hook_failures import failed_hooks, report_failure
from .taps import Function, around, on_import
from .training_loop import LoopRecorder

TENSORFLOW_TRAINER = "keras.src.backend.tensorflow.trainer"
TORCH_TRAINER = "keras.src.backend.torch.trainer"
MODEL = "keras.src.models.model"
FUNCTIONS = "tensorflow.python.eager.polymorphic_function.polymorphic_function"
ITERATORS = "tensorflow.python.data.ops.iterator_ops"
_HOOK = "Keras' training step"
_OPTIMIZER = "_paceline_optimizer"  # attribute of a tf.function: the optimizer that it applies


def next_batch(model: Any, iterator: Any) -> Any:
    """Return the next batch of a model's training; an experiment of diagnose replaces this."""
    return next(iterator)


def install(loop: LoopRecorder) -> None:
    """Record trainings with Keras, now or when the script imports it."""
    for name, patch in (
        (TENSORFLOW_TRAINER, _patch_tensorflow_trainer),
        (TORCH_TRAINER, _patch_torch_trainer),
        (MODEL, _patch_models),
    ):
        on_import(name, partial(patch, loop))


def _patch_tensorflow_trainer(loop: LoopRecorder, module: Any) -> None:
    """Record the steps and the evaluations of Keras with TensorFlow."""
    trainer, tf, batches = module.TensorFlowTrainer, module.tf, module.TFEpochIterator
    # a tf.data.Dataset is built, and its iterators
    _record_spans(loop, batches, State.INPUT, "__init__", "__next__")
    iterators = _Iterators(loop, trainer, batches)

    def make_train_function(make: Function, model: Any, /, *args: Any, **kwargs: Any) -> Any:
        before = model.train_function
        result = make(model, *args, **kwargs)
        if model.train_function is not before and model.train_function is not None:
            step = partial(_recorded_step, loop, tf, model, model.train_function, iterators)
            model.train_function = update_wrapper(step, model.train_function)
        return result

    around(trainer, "make_train_function", make_train_function)
    _record_spans(loop, trainer, State.VALIDATION, "evaluate", "predict")
    _OwnLoops(loop, tf, _base_optimizer(module))


def _base_optimizer(module: Any) -> Any:
    return module.optimizers_module.base_optimizer.BaseOptimizer


class _Iterators:
    """The iterators of ``fit`` with TensorFlow, whose end is recorded as a wait for input.

    At the end of an epoch Keras makes the iterator of the next one, also after the last epoch. Its
    end waits for the batch, or for all batches, that a Python generator has begun to make.
    """

    def __init__(self, loop: LoopRecorder, trainer: Any, epochs: Any) -> None:
        self._loop = loop
        self._epochs: list[Any] = []  # Keras' iterators over epochs
        self._of_epoch: Any = None
        around(epochs, "__init__", self._make_epoch)
        around(trainer, "fit", self._fit_and_end)

    def _make_epoch(self, make: Function, epoch: Any, /, *args: Any, **kwargs: Any) -> None:
        make(epoch, *args, **kwargs)
        if not (self._loop.busy or self._loop.ignores_thread()):
            self._epochs.append(epoch)

    def _fit_and_end(self, fit: Function, model: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return fit(model, *args, **kwargs)
        finally:
            self.use(None)

    def use(self, iterator: Any) -> None:
        """Keep the iterator of the present epoch, and end the one before; None: and all others."""
        if iterator is not self._of_epoch or iterator is None:
            _call_spanned(self._loop, State.INPUT, self._replace, iterator)

    def _replace(self, iterator: Any) -> None:
        self._of_epoch = iterator
        if iterator is None:
            self._epochs.clear()


class _OwnLoops:
    """The steps of TensorFlow's training loops that do not call ``fit``."""

    def __init__(self, loop: LoopRecorder, tf: Any, optimizer: Any) -> None:
        self._loop, self._tf = loop, tf
        self._traced: Any = None  # the outermost function, while it is called for the first time
        around(sys.modules[ITERATORS].OwnedIterator, "__next__", self._fetch)
        around(sys.modules[FUNCTIONS].Function, "__call__", self._call)
        around(optimizer, "apply", self._apply)

    def _is_recorded(self) -> bool:
        return not (self._loop.busy or self._loop.ignores_thread() or _HOOK in failed_hooks)

    def _fetch(self, fetch: Callable[[Any], Any], iterator: Any) -> Any:
        if not self._is_recorded() or not self._tf.executing_eagerly():
            return fetch(iterator)
        return self._loop.fetch(fetch, iterator, partial(_samples_in, self._tf))

    def _call(self, call: Function, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._traced is not None or not self._is_recorded():
            return call(function, *args, **kwargs)
        optimizer = function.__dict__.get(_OPTIMIZER)
        if optimizer is not None:
            return self._loop.whole_step(optimizer, partial(call, function, *args, **kwargs))
        self._traced = function
        try:
            return call(function, *args, **kwargs)
        finally:
            self._traced = None
            if (optimizer := function.__dict__.get(_OPTIMIZER)) is not None:
                self._loop.whole_step(optimizer, lambda: None)  # it was the first one

    def _apply(self, apply: Function, optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not self._tf.executing_eagerly():
            if self._traced is not None:  # perhaps in a thread of a tf.distribute strategy
                self._traced.__dict__.setdefault(_OPTIMIZER, optimizer)
            return apply(optimizer, *args, **kwargs)
        if self._traced is not None or not self._is_recorded():
            return apply(optimizer, *args, **kwargs)
        return self._loop.whole_step(optimizer, partial(apply, optimizer, *args, **kwargs))


def _recorded_step(
    loop: LoopRecorder,
    tf: Any,
    model: Any,
    step: Callable[[Any], Any],
    iterators: _Iterators,
    iterator: Any,
) -> Any:
    """Fetch a batch and make a step with it, both recorded."""
    if loop.busy or loop.ignores_thread() or _HOOK in failed_hooks:
        return step(iterator)
    given = iterator
    iterators.use(iterator)
    if isinstance(iterator, tf.data.Iterator) and model.steps_per_execution == 1:
        batch = loop.fetch(partial(next_batch, model), iterator, partial(_samples_in, tf))
        given = iter([batch])
    return loop.whole_step(model.optimizer, partial(step, given))


def _samples_in(tf: Any, batch: Any) -> int:
    """Return the number of samples of a batch: the first dimension of its first tensor."""
    first = tf.nest.flatten(batch)[0]
    return int(first.shape[0]) if len(first.shape) else 1


def _patch_torch_trainer(loop: LoopRecorder, module: Any) -> None:
    """Record the forward passes, optimizer steps and evaluations of Keras with PyTorch."""
    _record_spans(loop, module.TorchTrainer, State.VALIDATION, "evaluate", "predict")

    def apply_recorded(apply: Function, optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
        if loop.busy:
            return apply(optimizer, *args, **kwargs)
        loop.before_step(optimizer)
        result = apply(optimizer, *args, **kwargs)
        loop.after_step(optimizer)
        return result

    around(_base_optimizer(module), "apply", apply_recorded)


def _patch_models(loop: LoopRecorder, module: Any) -> None:
    """Record saves of models; with PyTorch also their forward passes."""
    _record_spans(loop, module.Model, State.CHECKPOINT, "save", "save_weights")
    if module.backend.backend() != "torch":
        return
    flatten, symbolic = sys.modules["keras.src.tree"].flatten, module.backend.KerasTensor

    def is_symbolic(inputs: Any) -> bool:
        """Return whether Keras calls a model to learn about shapes."""
        first = next(iter(flatten(inputs)), None)
        is_meta = isinstance(first, torch.Tensor) and first.device.type == "meta"
        return is_meta or isinstance(first, symbolic)

    def call_recorded(call: Function, model: Any, /, *args: Any, **kwargs: Any) -> Any:
        if loop.busy or loop.ignores_thread() or is_symbolic((args, kwargs)):
            return call(model, *args, **kwargs)
        return loop.forward(model, call, args, kwargs)

    around(module.Model, "__call__", call_recorded)


def _record_spans(loop: LoopRecorder, owner: Any, state: State, *names: str) -> None:
    """Record calls of methods as a whole in one state."""
    for name in names:
        around(owner, name, partial(_call_spanned, loop, state))


def _call_spanned(
    loop: LoopRecorder, state: State, function: Function, /, *args: Any, **kwargs: Any
) -> Any:
    if loop.busy or loop.ignores_thread():
        return function(*args, **kwargs)
    start = now()
    loop.recorder.begin(int(state), start)
    loop.busy = True
    try:
        return function(*args, **kwargs)
    finally:
        loop.busy = False
        try:
            loop.recorder.event(int(state), start, now())
        except Exception as error:
            report_failure(_HOOK, error)
