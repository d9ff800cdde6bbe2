"""The callbacks of ``horovod.keras.callbacks``."""

from typing import Any

import torch

from ..core.process_sets import ProcessSet, global_process_set
from ..torch import functions as torch_functions
from ..torch.basics import Average
from ..torch.mpi_ops import allreduce
from .callback_order import check_metrics_are_averaged, other_callbacks
from .learning_rate import LearningRateScheduleCallback as LearningRateScheduleCallback
from .learning_rate import LearningRateWarmupCallback as LearningRateWarmupCallback
from .library import keras
from .operations import broadcast_variables
from .optimizer import retrace_without_exchange


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
