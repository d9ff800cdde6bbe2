"""Restoring a saved state into an object of any layout.

A saved tensor is the whole one, whatever layout saved it. It is given to the object as the part
that this rank holds, where the object's own state has a DTensor.

Modules and optimizers are restored in their own memory, tensor by tensor, so that no rank holds its
part of the state twice.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..checkpoint.sharded_tensor import SavedTensor, copy_into, is_sharded, placed_like
from ..optim.gradients import parameters_of
from ..parallel.offload import placed_on_host
from ..parallel.strategy.model_state import OwnedState, Shape, WholeModel, WholeOptimizer
from ..plurals import counted
from ..record.hooks.script_options import FIRST_RATE

MAX_SHOWN_DIFFERENCES = 3

# Keys of a parameter group that schedulers add, or that every group has
_NOT_OF_OPTIMIZERS = {"params", "param_names", "initial_lr", "max_lr", "min_lr"} | {
    *("max_momentum", "base_momentum", FIRST_RATE),
}
# States of PyTorch's optimizers with the shape of the parameter
_LIKE_PARAMETERS = {"exp_avg", "exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "sum"}


def load_part(part: Any, state: Any, name: str, owned: OwnedState | None = None) -> None:
    """Restore the state of one object.

    Args:
        part: The object, with ``load_state_dict``.
        state: Its saved state.
        name: Name of the object in error messages.
        owned: Knows what the objects are that a layout divides.

    Raises:
        ValueError: The state does not fit the object; the message names what differs first. Where a
            layout divides the object, it is the same on all ranks.
    """
    whole = owned.whole_of(part) if owned is not None else None
    problem = ""
    if isinstance(part, Optimizer):
        shapes = whole.shapes if isinstance(whole, WholeOptimizer) else _shapes_of(part)
        problem = _optimizer_difference(part, shapes, state)
    elif isinstance(whole, WholeModel):
        problem = _difference(whole.shapes, state)
    try:
        if not problem:
            own = state if owned is None else owned.local(part, state)
            placed = placed_for(part, own)
            if isinstance(whole, WholeModel):
                placed = _with_versions(part, placed)
            part.load_state_dict(placed)
            return
    except (RuntimeError, ValueError, KeyError) as error:
        found = isinstance(part, nn.Module) and _difference(WholeModel.of(part).shapes, state)
        problem = found or " ".join(str(error).split())[:300]
    raise ValueError(
        f"the checkpoint does not fit this script's {name}: {problem}. HINT: resume with the "
        "script that saved it, or set another checkpoint folder"
    )


def _with_versions(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state as one of the present versions of the module's parts.

    PyTorch adds the tensors that earlier versions lack, such as the number of batches of batch
    normalization, also where another rank has the layer.
    """
    found = OrderedDict(state)
    found._metadata = module.state_dict()._metadata  # type: ignore[attr-defined]
    return found


def placed_for(part: Any, state: Any) -> Any:
    """Return a saved state for ``part.load_state_dict``, placed as in the object's own state.

    The tensors of a module or an optimizer are its own ones, which have the saved values then.
    Others, and those of other objects, are in new memory.
    """
    if isinstance(part, Optimizer):
        return _placed_for_optimizer(part, state)
    own = part.state_dict()
    if isinstance(part, nn.Module) and isinstance(state, dict) and isinstance(own, dict):
        return {name: _restored(value, own.get(name)) for name, value in state.items()}
    return _placed(state, own)


def _restored(saved: Any, own: Any) -> Any:
    """Return a tensor with a saved value: the object's own one if it fits, else a new one."""
    if isinstance(saved, torch.Tensor | SavedTensor) and copy_into(saved, own):
        return own
    return _placed(saved, own)


def _placed(state: Any, like: Any) -> Any:
    if isinstance(state, torch.Tensor | SavedTensor):
        return placed_like(state, like)
    if isinstance(state, dict):
        like_value = like if isinstance(like, dict) else {}
        return {key: _placed(value, like_value.get(key)) for key, value in state.items()}
    if type(state) in (list, tuple):
        has_each = isinstance(like, list | tuple) and len(like) == len(state)
        likes = like if has_each else [None] * len(state)
        return type(state)(map(_placed, state, likes))
    return state


def _placed_for_optimizer(optimizer: Optimizer, state: Any) -> Any:
    """Return an optimizer's state, in its own tensors or placed like its parameters.

    A new optimizer has no states yet. They have the shape of their parameter, except few.
    """
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return _placed(state, None)
    parameters = dict(enumerate(parameters_of(optimizer)))
    placed = {
        key: _placed_for_parameter(optimizer, parameters.get(key), saved)
        if isinstance(saved, dict)
        else _placed(saved, None)
        for key, saved in state["state"].items()
    }
    others = {key: _placed(value, None) for key, value in state.items() if key != "state"}
    return {**others, "state": placed}


def _placed_for_parameter(
    optimizer: Optimizer, parameter: Any, saved: dict[Any, Any]
) -> dict[Any, Any]:
    """Return the optimizer's states of one parameter."""
    own = optimizer.state.get(parameter, {})
    return {
        name: own[name]
        if isinstance(value, torch.Tensor | SavedTensor) and copy_into(value, own.get(name))
        # one by one: the device need not have memory for all of an offloaded optimizer
        else placed_on_host(optimizer, _placed_like_parameter(value, parameter))
        for name, value in saved.items()
    }


def _placed_like_parameter(value: Any, parameter: Any) -> Any:
    if not isinstance(value, torch.Tensor | SavedTensor):
        return _placed(value, None)
    placed = placed_like(value, parameter)
    if is_sharded(parameter) and not is_sharded(placed) and placed.dim():
        # such as Adafactor's row sums, which its step combines with DTensors
        from torch.distributed.tensor import DTensor, Replicate

        mesh = parameter.device_mesh
        local = placed.to(parameter.to_local().device)
        return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return placed


def _difference(own: Mapping[str, Shape], state: Any) -> str:
    """Return the first names and shapes in which a saved model differs from the script's."""
    if not isinstance(state, dict):
        return ""
    found = [
        line
        for name in dict.fromkeys([*own, *state])
        if (line := _difference_of(name, state.get(name), own.get(name)))
    ]
    more = len(found) - MAX_SHOWN_DIFFERENCES
    shown = "; ".join(found[:MAX_SHOWN_DIFFERENCES])
    return f"{shown}; and {more} more" if more > 0 else shown


def _difference_of(name: str, saved: Any, own: Shape | None) -> str:
    if saved is None and own is not None:
        return f"{name} is missing in the checkpoint"
    if own is None:
        return f"{name} of the checkpoint is unknown to the model" if saved is not None else ""
    shape = tuple(getattr(saved, "shape", ()))
    if shape == own:
        return ""
    return f"{name} has shape {shape} in the checkpoint and {own} in the model"


def _shapes_of(optimizer: Optimizer) -> list[list[Shape]]:
    """Return the shapes of an optimizer's parameters, for each group."""
    return [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]


def _optimizer_difference(
    optimizer: Optimizer, shapes: Sequence[Sequence[Shape]], state: Any
) -> str:
    """Return how a saved optimizer differs from the script's; "" if it fits.

    ``load_state_dict`` of PyTorch takes the options and states of any optimizer.

    Args:
        shapes: Of each group, those of its parameters in the whole model.
    """
    if not isinstance(state, dict) or not state.get("param_groups"):
        return ""
    saved_sizes = [len(group["params"]) for group in state["param_groups"]]
    sizes = [len(group) for group in shapes]
    kind = type(optimizer).__name__
    if saved_sizes != sizes:
        return (
            f"the numbers of parameters in the groups of the {kind} are {saved_sizes} in the "
            f"checkpoint and {sizes} in the script"
        )
    saved = state["param_groups"][0].keys() - _NOT_OF_OPTIMIZERS
    missing = sorted(optimizer.defaults.keys() - saved)
    unknown = sorted(saved - optimizer.param_groups[0].keys())
    if missing and unknown:  # another version of PyTorch has more options, or less
        return (
            f"the {kind} has no option {', '.join(unknown)} of the checkpoint, which has no "
            f"{', '.join(missing)}"
        )
    states = state.get("state", {})
    for key, shape_of_parameter in enumerate(shape for group in shapes for shape in group):
        values = states.get(key, {})
        for name, value in values.items() if isinstance(values, dict) else ():
            saved_shape = tuple(getattr(value, "shape", ()))
            if name in _LIKE_PARAMETERS and saved_shape != shape_of_parameter:
                return (
                    f"{name} of the {kind}'s parameter {key} has shape {saved_shape} in the "
                    f"checkpoint, and the parameter {shape_of_parameter} in the script"
                )
    # PyTorch would keep them
    unknown_keys = [key for key in states if isinstance(key, int) and not 0 <= key < sum(sizes)]
    if unknown_keys:
        return (
            f"the checkpoint has a state of parameter {unknown_keys[0]} of the {kind}, which has "
            f"{counted(sum(sizes), 'parameter')}"
        )
    return ""
