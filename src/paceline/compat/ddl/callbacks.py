"""The callbacks of ``ddl``: on those of ``horovod.keras``."""

from typing import Any

from ..horovod.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
    other_callbacks,
)
from ..horovod.keras.operations import report_devices
from ..horovod.keras.optimizer import DistributedOptimizer, is_distributed

_FIRST_AND_LAST = "HINT: callbacks=[ddl.DDLCallback(), ..., ddl.DDLGlobalVariablesCallback()]"
report_devices()  # import ddl has initialized this rank, without Keras


class DDLCallback(MetricAverageCallback):
    """Exchange the gradients of the model's optimizer, and average the metrics of each epoch.

    It is the first of the callbacks.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        callbacks = other_callbacks()
        if self in callbacks and callbacks[0] is not self:
            raise ValueError(
                f"ddl.DDLCallback comes after {type(callbacks[0]).__name__}, which would get the "
                f"metrics of its own rank. {_FIRST_AND_LAST}"
            )
        if callbacks and not any(
            isinstance(callback, DDLGlobalVariablesCallback) for callback in callbacks
        ):
            raise ValueError(
                "ddl.DDLCallback needs ddl.DDLGlobalVariablesCallback: without it, the ranks begin "
                f"with different weights. {_FIRST_AND_LAST}"
            )
        super().on_train_begin(logs)
        if not is_distributed(self.model.optimizer):
            DistributedOptimizer(self.model.optimizer)


class DDLGlobalVariablesCallback(BroadcastGlobalVariablesCallback):
    """Give all ranks the weights and the optimizer's state of rank 0.

    It is the last of the callbacks.
    """

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__(root_rank)

    def on_train_begin(self, logs: Any = None) -> None:
        callbacks = other_callbacks()
        if self in callbacks and callbacks[-1] is not self:
            raise ValueError(
                f"{type(callbacks[-1]).__name__} comes after ddl.DDLGlobalVariablesCallback. "
                f"{_FIRST_AND_LAST}"
            )
        if not is_distributed(self.model.optimizer):
            raise ValueError(
                "ddl.DDLGlobalVariablesCallback needs ddl.DDLCallback before it: without it, "
                f"gradients are not exchanged. {_FIRST_AND_LAST}"
            )
        super().on_train_begin(logs)
