"""Learning rates of larger numbers of ranks: ``horovod.keras.callbacks``' schedules."""

import functools
from collections.abc import Callable
from typing import Any

from ....record.ring.launcher_messages import notify
from ..torch.basics import rank, size
from .library import BACKEND, keras

Multiplier = Callable[[float], float]  # of an epoch, with a fraction


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
