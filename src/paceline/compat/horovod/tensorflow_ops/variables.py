"""Variables and Python objects of one rank for all ranks."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..core.process_sets import ProcessSet, global_process_set
from ..torch.functions import allgather_object as gather_object
from ..torch.functions import broadcast_object as send_object
from ..torch.mpi_ops import broadcast_async, synchronize
from .host_calls import call_on_host, specs_of
from .library import tf


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Give the variables of all ranks the values of ``root_rank``.

    Args:
        variables: Variables of TensorFlow or Keras, in the same order on all ranks.
        inplace: Not used: variables are always assigned.
    """
    found = list(variables)
    if not found or not process_set.included():
        return
    values = [tf.convert_to_tensor(one) for one in found]

    def call(*own: torch.Tensor) -> Sequence[torch.Tensor]:
        handles = [
            broadcast_async(one, root_rank, f"variable.{number}", process_set)
            for number, one in enumerate(own)
        ]
        return [synchronize(handle) for handle in handles]

    for one, value in zip(found, call_on_host(call, values, specs_of(values)), strict=True):
        one.assign(value)


def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Give the variables of all ranks the values of ``root_rank``, and return them."""
    found = list(variables)
    broadcast_variables(found, root_rank, process_set)
    return found


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of ``root_rank`` on all ranks. Same rules as in ``horovod.torch``.

    session: Not used: of TensorFlow 1.
    """
    return send_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that broadcasts an object."""
    return lambda obj: send_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all ranks, by rank. Same rules as in ``horovod.torch``."""
    return gather_object(obj, name, process_set)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise an error: TensorFlow 2 has no global variables."""
    raise NotImplementedError(
        "hvd.broadcast_global_variables() is not supported with TensorFlow 2. HINT: "
        "hvd.broadcast_variables(model.variables, root_rank=0)"
    )
