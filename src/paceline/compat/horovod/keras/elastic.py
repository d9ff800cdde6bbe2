"""Elastic training with Keras: the names of ``horovod.keras.elastic``.

A state is one of ``horovod.torch.elastic``, whose commits the ranks of a restart find.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from ..core.errors import HorovodInternalError
from ..torch.elastic import TorchState
from ..torch.elastic import run as run_states
from ..torch.elastic.state import StateDictHandler, get_handler_registry
from .library import keras
from .operations import IS_TENSORFLOW, broadcast_variables

if IS_TENSORFLOW:
    from ..tensorflow_ops.host_calls import error_of_call
    from ..tensorflow_ops.library import tf


class _VariablesHandler(StateDictHandler):
    """Handler of a model or optimizer: the values of its variables, by their numbers."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self._saved = {
            str(number): np.array(keras.ops.convert_to_numpy(one))
            for number, one in enumerate(self._variables())
        }

    def restore(self) -> None:
        self.load(self._saved)

    def sync(self) -> None:
        broadcast_variables(self._variables(), root_rank=0)
        self.save()

    def load(self, saved: Any) -> None:
        variables = self._variables()
        if len(variables) != len(saved):
            raise ValueError(
                f"the last commit has {len(saved)} variables, and this state's "
                f"{type(self.value).__name__} has {len(variables)}. HINT: build the model and the "
                "optimizer (optimizer.build(model.trainable_variables)) before the state"
            )
        for number, one in enumerate(variables):
            one.assign(saved[str(number)])
        self.save()

    def _variables(self) -> list[Any]:
        is_model = isinstance(self.value, keras.Model)
        return list(self.value.weights if is_model else self.value.variables)


# before those of torch: with the PyTorch backend, a model of Keras is a module as well
get_handler_registry()[:0] = [
    (keras.Model, _VariablesHandler),
    (keras.optimizers.Optimizer, _VariablesHandler),
]


class KerasState(TorchState):
    """State of a training: a model, its optimizer and Python objects, which are attributes.

    Args:
        model: A model that is built.
        optimizer: Its optimizer; None: that of ``model.compile``.
        backend: Not used.
        kwargs: Further values by name, for instance ``batch=0, epoch=0``.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built and model.built:
            optimizer.build(model.trainable_variables)
        super().__init__(model, optimizer, **kwargs)


class VariablesState(TorchState):
    """State of variables of TensorFlow and of Python objects, which are attributes.

    Args:
        variables: The variables, in the same order on all ranks.
        session: Not used: of TensorFlow 1.
    """

    def __init__(self, variables: Any, session: Any = None, **kwargs: Any) -> None:
        super().__init__(variables=_Variables(variables), **kwargs)


class _Variables:
    def __init__(self, variables: Any) -> None:
        self.variables = list(variables)


get_handler_registry().append((_Variables, _VariablesHandler))


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Have a training function continue after a rank was lost, as ``horovod.torch.elastic.run``."""

    @wraps(func)
    def translated(*args: Any, **kwargs: Any) -> Any:
        if not IS_TENSORFLOW:
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except tf.errors.OpError as error:
            cause = error_of_call(error)  # of a collective inside tf.function
            if not isinstance(cause, HorovodInternalError):
                raise
            raise cause from error

    return run_states(translated)


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commit the state every ``batches_per_commit`` batches, and at the end of each epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.state.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Store the number of the current batch in ``state.batch``; 0 at the end of an epoch."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.params.get("steps"):
            if self.steps_per_epoch is None:
                self.steps_per_epoch = self.params["steps"]
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Store the number of finished epochs of all attempts in ``state.epoch``."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state, self.initial_epoch = state, state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1
