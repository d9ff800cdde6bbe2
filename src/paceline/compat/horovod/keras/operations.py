"""Collectives on tensors of Keras' backend, and values of its variables for all ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..core import world
from ..core.process_sets import ProcessSet, global_process_set
from ..gradient_rules import GradientList
from ..torch import functions as torch_functions
from ..torch import mpi_ops as torch_ops
from ..torch.basics import Average, Min
from ..torch.compression import Compression
from ..torch.gradient_exchange import ExchangeOptions
from .library import BACKEND, keras

IS_TENSORFLOW = BACKEND == "tensorflow"
if IS_TENSORFLOW:
    from ..tensorflow_ops import collectives, gradients, library


def init(*args: Any, **kwargs: Any) -> None:
    """Initialize this rank, as ``horovod.torch.init``."""
    world.init(*args, **kwargs)
    report_devices()


def report_devices() -> None:
    """Say once in a job that TensorFlow's tensors of GPUs are copied."""
    if IS_TENSORFLOW:
        library.report_devices(world.current_world().rank)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
) -> Any:
    """Return a value (a tensor, an array or a number) reduced over all ranks."""
    options = {
        "average": average, "op": op, "name": name, "compression": compression,
        "prescale_factor": prescale_factor, "postscale_factor": postscale_factor,
    }  # fmt: skip
    return _operations().allreduce(_tensor(value), **options)


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the ranks' values concatenated; they may differ in the first dimension."""
    return _operations().allgather(_tensor(value), name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of the global rank ``root_rank``."""
    return _operations().broadcast(_tensor(value), root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> Any:
    """Return this rank's part (of the first dimension) of a value reduced over all ranks."""
    return _operations().reducescatter(_tensor(value), name=name, op=op)


def _tensor(value: Any) -> Any:
    return keras.ops.convert_to_tensor(value)


def _operations() -> Any:
    return collectives if IS_TENSORFLOW else torch_ops


def broadcast_global_variables(root_rank: int) -> None:
    """Raise an error: Keras 3 has no global variables."""
    raise NotImplementedError(
        "hvd.broadcast_global_variables() is not supported: Keras 3 has no global variables. HINT: "
        "callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)]"
    )


def sum_tensors(tensor: Any, name: str) -> Any:
    """Return the sum over all ranks of a tensor of the backend, which has a gradient."""
    return _operations().allreduce(tensor, op=torch_ops.Sum, name=name)


def all_true(condition: Any, process_set: ProcessSet) -> Any:
    """Return whether a tensor of one boolean is true on all ranks."""
    own = keras.ops.cast(condition, "int32")
    least = _operations().allreduce(own, op=Min, name="all_true", process_set=process_set)
    return keras.ops.cast(least, "bool")


def exchange_gradients(
    own: list[Any], names: list[str], options: ExchangeOptions, groups: list[list[int]]
) -> list[Any]:
    """Return gradients reduced over all ranks. Those of torch are reduced in place."""
    if IS_TENSORFLOW:
        return gradients.exchange_gradients(own, names, options, groups)
    results: list[Any] = _uncompiled_exchange(own, names, options, groups)
    return results


@torch.no_grad()
def _exchange_torch(
    own: list[Any], names: list[str], options: ExchangeOptions, groups: list[list[int]]
) -> list[Any]:
    exchange = GradientList(options, in_place=True)
    own = _apart(own)
    order = list(range(len(own)))
    if groups:
        for group in groups:
            exchange.submit_group(f"group.{names[group[0]]}", [own[at] for at in group])
        order = [at for group in groups for at in group]
    else:
        exchange.submit(names, own)
    results = dict(zip(order, exchange.wait(), strict=True))
    return [results[at] for at in range(len(own))]


def _apart(tensors: list[Any]) -> list[Any]:
    """Return the tensors, with copies of those that have the same memory as an earlier one.

    ``torch.autograd.grad`` returns one tensor for both terms of a sum.
    """
    known: set[int] = set()
    found = []
    for tensor in tensors:
        found.append(tensor.clone() if tensor.data_ptr() in known else tensor)
        known.add(tensor.data_ptr())
    return found


_uncompiled_exchange: Any = torch.compiler.disable(_exchange_torch)


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Give variables of Keras the values of ``root_rank``.

    Args:
        variables: In the same order on all ranks.
    """
    if not variables or process_set.size() == 1 or not process_set.included():
        return
    values = [np.array(keras.ops.convert_to_numpy(one)) for one in variables]
    tensors = [torch.from_numpy(_as_integers(one)) for one in values]
    named = [(f"variable.{number}", tensor) for number, tensor in enumerate(tensors)]
    torch_functions.broadcast_parameters(named, root_rank, process_set)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _as_integers(array: Any) -> Any:
    """Return a view of an array whose dtype torch does not know (bfloat16) as bytes."""
    if array.dtype.kind == "V" or array.dtype.name == "bfloat16":
        return array.reshape(-1).view(np.uint8)
    return array
