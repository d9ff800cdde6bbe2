"""The callbacks of ``horovod.keras.callbacks``."""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....record.ring.launcher_messages import notify
from ..core.process_sets import ProcessSet, global_process_set
from ..torch import functions as torch_functions
from ..torch.basics import Average, rank, size
from ..torch.mpi_ops import allreduce
from .library import BACKEND, keras
from .operations import broadcast_variables
from .optimizer import retrace_without_exchange

Multiplier = Callable[[float], float]  # of an epoch, with a fraction
# Callbacks that decide by a metric. Ranks with different values would decide differently, and wait
# for each other for ever.
DECIDING = ("EarlyStopping", "ReduceLROnPlateau")


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Set the learning rate to ``initial_lr * multiplier(epoch)`` within a range of epochs.

    Args:
        initial_lr: Learning rate that is multiplied.
        multiplier: Function of the epoch, or the base of an exponential decay from ``start_epoch``.
        start_epoch: First epoch of the range.
        end_epoch: Epoch after the range; None: to the end.
        staircase: Set the rate once an epoch; otherwise before every step, for epochs with a
            fraction.
        momentum_correction: Scale the momentum with the rate for one step
            (arXiv 1706.02677). It has an effect where Keras calls the optimizer in every step: with
            the PyTorch backend, or ``run_eagerly=True``.
        steps_per_epoch: Steps of an epoch; None: as Keras says.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: Any,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required. HINT: initial_lr=0.01")
        self.initial_lr, self.staircase = initial_lr, staircase
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self.multiplier: Multiplier = multiplier
        if not callable(multiplier):
            self.multiplier = lambda epoch: multiplier ** (epoch - start_epoch)
        self.current_epoch = 0
        self._momentum: float | None = None  # to be restored after this step

    def on_train_begin(self, logs: Any = None) -> None:
        _check_rate(self.model.optimizer, type(self).__name__)
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    "Could not autodetect the number of steps per epoch. HINT: "
                    f"{type(self).__name__}(..., steps_per_epoch=N)"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set_rate(epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set_rate(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._momentum is not None:
            self._inner().momentum = self._momentum
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = self._rate()

    def _inner(self) -> Any:
        return getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set_rate(self, epoch: float) -> None:
        old, new = self._rate(), self.initial_lr * self.multiplier(epoch)
        self.model.optimizer.learning_rate = new
        momentum = getattr(self._inner(), "momentum", 0.0)
        if not self.momentum_correction or not momentum or not old or new == old:
            return
        if BACKEND == "torch" or self.model.run_eagerly:
            self._momentum = momentum
            self._inner().momentum = momentum * new / old
        elif rank() == 0:
            _report_momentum()


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from ``initial_lr / hvd.size()`` to ``initial_lr`` in some epochs.

    Args:
        initial_lr: Learning rate after the warm-up, usually of one rank times ``hvd.size()``.
        warmup_epochs: Epochs of the warm-up.
        momentum_correction, steps_per_epoch: Same as in ``LearningRateScheduleCallback``.
        verbose: 1: rank 0 prints the end of the warm-up.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # Round numbers at the ends of epochs.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            return 1.0 / size() * (epoch * (size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        is_last = self.end_epoch is not None and epoch == self.end_epoch - 1
        if is_last and self.verbose > 0 and rank() == 0:
            done = f"finished gradual learning rate warmup to {self._rate():g}"
            print(f"\nEpoch {epoch + 1}: {done}.")


def _check_rate(optimizer: Any, callback: str) -> None:
    """Raise ValueError if the optimizer computes its learning rate itself."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(
        getattr(inner, "_learning_rate", None),
        keras.optimizers.schedules.LearningRateSchedule,
    ):
        raise ValueError(
            f"{callback} can't set the learning rate of an optimizer that has a "
            "LearningRateSchedule. HINT: give the optimizer a number as its learning rate, or "
            "leave the callback out"
        )


@functools.cache
def _report_momentum() -> None:
    notify(
        "paceline: momentum_correction has no effect: TensorFlow has compiled the training step "
        "with the momentum. HINT: momentum_correction=False, or model.compile(..., "
        "run_eagerly=True)\n"
    )


def other_callbacks() -> list[Any]:
    """Return the list of callbacks that contains the calling one, in order.

    To be called in ``on_train_begin``. [] if it is not known.
    """
    found: Any = None
    frame = sys._getframe(1)
    for _ in range(4):
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList):
            found = owner
            break
        if frame.f_back is None:
            break
        frame = frame.f_back
    own_kinds = (keras.callbacks.History, keras.callbacks.ProgbarLogger)
    listed = found.callbacks if found is not None else ()
    return [one for one in listed if not isinstance(one, own_kinds)]


def check_metrics_are_averaged(own: Any, callbacks: Sequence[Any]) -> None:
    """Raise ValueError if a callback that decides by a metric comes before ``own``."""
    before = callbacks[: callbacks.index(own)] if own in callbacks else ()
    deciding = tuple(getattr(keras.callbacks, name) for name in DECIDING)
    for one in before:
        if isinstance(one, deciding):
            raise ValueError(
                f"{type(own).__name__} comes after {type(one).__name__}, which would decide by the "
                "metric of its own rank, differently on each rank. HINT: put "
                f"{type(own).__name__}() before it in callbacks=[...]"
            )


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Give all ranks the weights and the optimizer's state of one rank.

    Those that exist when the training begins are sent then, so that all ranks begin with the same
    weights; layers and optimizers that Keras builds in the first step, after it. If some ranks have
    built more than others when the training begins, all are sent after the first step. Random
    states of layers (dropout) are not sent.

    Args:
        root_rank: Global rank whose values all ranks get.
        device: Not used.
        process_set: Ranks that take part.
    """

    def __init__(
        self, root_rank: int, device: str = "", process_set: ProcessSet = global_process_set
    ) -> None:
        super().__init__()
        self.root_rank, self.process_set = root_rank, process_set
        self.broadcast_done = False
        self._sent: set[int] = set()
        self._local: set[int] = set()

    def register_local_var(self, variable: Any) -> None:
        """Exclude a variable: each rank keeps its own value."""
        self._local.add(id(variable))

    def on_train_begin(self, logs: Any = None) -> None:
        retrace_without_exchange(self.model)
        if not self.broadcast_done:
            self._send(is_first=True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.broadcast_done:
            self._send(is_first=False)
            self.broadcast_done = True

    def _send(self, is_first: bool) -> None:
        if self.process_set.size() == 1 or not self.process_set.included():
            return
        optimizer = getattr(self.model, "optimizer", None)
        found = [*self.model.weights, *(getattr(optimizer, "variables", None) or ())]
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        # Each rank has gradients of its own in them.
        sums = {id(one) for one in getattr(inner, "_accumulated_gradients", ())}
        new = [one for one in found if id(one) not in self._sent | self._local | sums]
        own = [(str(one.dtype), list(one.shape)) for one in new]
        everyone = torch_functions.allgather_object(own, "variables", self.process_set)
        if any(other != own for other in everyone):
            if is_first:
                return
            counts = ", ".join(str(len(other)) for other in everyone)
            raise ValueError(
                f"{type(self).__name__}: ranks have different variables of the model and its "
                f"optimizer; their numbers are {counts}. HINT: build the same model and optimizer "
                "on every rank"
            )
        broadcast_variables(new, self.root_rank, self.process_set)
        self._sent |= {id(one) for one in new}


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Average the metrics of an epoch over all ranks, for this and all later callbacks.

    Args:
        device: Not used.
        process_set: Ranks that take part.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.process_set = process_set

    def on_train_begin(self, logs: Any = None) -> None:
        check_metrics_are_averaged(self, other_callbacks())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs and self.process_set.included() and self.process_set.size() != 1:
            logs.update(average_metrics(logs, self.process_set))


def average_metrics(logs: dict[str, Any], process_set: ProcessSet) -> dict[str, float]:
    """Return the averages over all ranks of the numbers in ``logs``.

    Raises:
        ValueError: Ranks have different metrics.
    """
    names = sorted(name for name, value in logs.items() if _is_number(value))
    everyone = torch_functions.allgather_object(
        names, name="metrics.names", process_set=process_set
    )
    if any(other != names for other in everyone):
        only = set().union(*everyone) - set.intersection(*map(set, everyone))
        raise ValueError(
            f"MetricAverageCallback: ranks have different metrics: only some have "
            f"{', '.join(sorted(only))}. HINT: pass the same metrics and validation_data on every "
            "rank"
        )
    values = torch.tensor([float(logs[name]) for name in names], dtype=torch.float64)
    if names:
        values = allreduce(values, op=Average, name="metrics", process_set=process_set)
    return dict(zip(names, values.tolist(), strict=True))


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
