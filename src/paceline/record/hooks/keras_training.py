"""Record scripts that train with ``keras.Model.fit``, with the TensorFlow or the PyTorch backend,
and TensorFlow's own training loops.

With PyTorch, forward, backward, optimizer step and batches are those of torch; Keras' models and
optimizers are no modules and optimizers that torch calls, so they are patched here. TensorFlow
computes a step as a whole: it is recorded as one backward, with the waits for collectives inside.
Its batches are fetched by a call of their own, and given to the same compiled step.

In a loop without ``fit``, a call of a ``tf.function`` is a step if an optimizer of Keras was
applied while TensorFlow traced it. An optimizer that is applied outside of functions ends a step.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..ring.recorder import now
from ..ring.states import State
from .hook_failures import failed_hooks, report_failure
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


def patch_tensorflow_trainer(loop: LoopRecorder, module: Any) -> None:
    """Record the steps and the evaluations of Keras with TensorFlow."""
    trainer, tf, batches = module.TensorFlowTrainer, module.tf, module.TFEpochIterator
    for name in ("__init__", "__next__"):  # a tf.data.Dataset is built, and its iterators
        setattr(batches, name, _spanned(loop, getattr(batches, name), State.INPUT))
    iterators = _Iterators(loop, trainer, batches)
    original = trainer.make_train_function

    @functools.wraps(original)
    def make_train_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.train_function
        result = original(self, *args, **kwargs)
        if self.train_function is not before and self.train_function is not None:
            step = self.train_function
            self.train_function = _recorded_step(loop, tf, self, step, iterators)
        return result

    trainer.make_train_function = make_train_function
    _patch_evaluation(loop, trainer)
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
        fit, make = trainer.fit, epochs.__init__

        @functools.wraps(make)
        def init(epoch: Any, *args: Any, **kwargs: Any) -> None:
            make(epoch, *args, **kwargs)
            if not (loop.busy or loop.ignores_thread()):
                self._epochs.append(epoch)

        @functools.wraps(fit)
        def fit_and_end(model: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return fit(model, *args, **kwargs)
            finally:
                self.use(None)

        epochs.__init__, trainer.fit = init, fit_and_end

    def use(self, iterator: Any) -> None:
        """Keep the iterator of the present epoch, and end the one before; None: and all others."""
        if iterator is not self._of_epoch or iterator is None:
            _spanned(self._loop, self._replace, State.INPUT)(iterator)

    def _replace(self, iterator: Any) -> None:
        self._of_epoch = iterator
        if iterator is None:
            self._epochs.clear()


class _OwnLoops:
    """The steps of TensorFlow's training loops that do not call ``fit``."""

    def __init__(self, loop: LoopRecorder, tf: Any, optimizer: Any) -> None:
        self._loop, self._tf = loop, tf
        self._traced: Any = None  # the outermost function, while it is called for the first time
        iterator = sys.modules[ITERATORS].OwnedIterator
        function: Any = sys.modules[FUNCTIONS].Function
        iterator.__next__ = self._fetched(iterator.__next__)
        function.__call__ = self._called(function.__call__)
        optimizer.apply = self._applied(optimizer.apply)

    def _is_recorded(self) -> bool:
        return not (self._loop.busy or self._loop.ignores_thread() or _HOOK in failed_hooks)

    def _fetched(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(original)
        def fetched(iterator: Any) -> Any:
            if not self._is_recorded() or not self._tf.executing_eagerly():
                return original(iterator)
            return self._loop.fetch(iterator, original, functools.partial(_samples_in, self._tf))

        return fetched

    def _called(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def called(function: Any, *args: Any, **kwargs: Any) -> Any:
            if self._traced is not None or not self._is_recorded():
                return original(function, *args, **kwargs)
            optimizer = function.__dict__.get(_OPTIMIZER)
            if optimizer is not None:
                call = functools.partial(original, function, *args, **kwargs)
                return self._loop.whole_step(optimizer, call)
            self._traced = function
            try:
                return original(function, *args, **kwargs)
            finally:
                self._traced = None
                if (optimizer := function.__dict__.get(_OPTIMIZER)) is not None:
                    self._loop.whole_step(optimizer, lambda: None)  # it was the first one

        return called

    def _applied(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def applied(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._tf.executing_eagerly():
                if self._traced is not None:  # perhaps in a thread of a tf.distribute strategy
                    self._traced.__dict__.setdefault(_OPTIMIZER, optimizer)
                return original(optimizer, *args, **kwargs)
            call = functools.partial(original, optimizer, *args, **kwargs)
            if self._traced is not None or not self._is_recorded():
                return call()
            return self._loop.whole_step(optimizer, call)

        return applied


def _recorded_step(
    loop: LoopRecorder, tf: Any, model: Any, step: Callable[[Any], Any], iterators: _Iterators
) -> Callable[[Any], Any]:
    """Return a function that fetches a batch and makes a step with it, both recorded."""

    @functools.wraps(step)
    def recorded(iterator: Any) -> Any:
        if loop.busy or loop.ignores_thread() or _HOOK in failed_hooks:
            return step(iterator)
        given = iterator
        iterators.use(iterator)
        if isinstance(iterator, tf.data.Iterator) and model.steps_per_execution == 1:
            fetch = functools.partial(next_batch, model)
            batch = loop.fetch(iterator, fetch, functools.partial(_samples_in, tf))
            given = iter([batch])
        return loop.whole_step(model.optimizer, functools.partial(step, given))

    return recorded


def _samples_in(tf: Any, batch: Any) -> int:
    """Return the number of samples of a batch: the first dimension of its first tensor."""
    first = tf.nest.flatten(batch)[0]
    return int(first.shape[0]) if len(first.shape) else 1


def patch_torch_trainer(loop: LoopRecorder, module: Any) -> None:
    """Record the forward passes, optimizer steps and evaluations of Keras with PyTorch."""
    _patch_evaluation(loop, module.TorchTrainer)
    optimizer = _base_optimizer(module)
    apply = optimizer.apply

    @functools.wraps(apply)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if loop.busy:
            return apply(self, *args, **kwargs)
        loop.before_step(self)
        result = apply(self, *args, **kwargs)
        loop.after_step(self)
        return result

    optimizer.apply = recorded


def patch_models(loop: LoopRecorder, module: Any) -> None:
    """Record saves of models; with PyTorch also their forward passes."""
    model = module.Model
    for name in ("save", "save_weights"):
        setattr(model, name, _spanned(loop, getattr(model, name), State.CHECKPOINT))
    if module.backend.backend() != "torch":
        return
    call = model.__call__
    flatten, symbolic = sys.modules["keras.src.tree"].flatten, module.backend.KerasTensor

    def is_symbolic(inputs: Any) -> bool:
        """Return whether Keras calls a model to learn about shapes."""
        first = next(iter(flatten(inputs)), None)
        is_meta = isinstance(first, torch.Tensor) and first.device.type == "meta"
        return is_meta or isinstance(first, symbolic)

    @functools.wraps(call)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if loop.busy or loop.ignores_thread() or is_symbolic((args, kwargs)):
            return call(self, *args, **kwargs)
        return loop.forward(self, call, args, kwargs)

    model.__call__ = recorded


def _patch_evaluation(loop: LoopRecorder, trainer: Any) -> None:
    for name in ("evaluate", "predict"):
        setattr(trainer, name, _spanned(loop, getattr(trainer, name), State.VALIDATION))


def _spanned(loop: LoopRecorder, function: Any, state: State) -> Callable[..., Any]:
    """Return a function that is recorded as a whole in one state."""

    @functools.wraps(function)
    def spanned(*args: Any, **kwargs: Any) -> Any:
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

    return spanned
