"""Optimizer states in the host's memory: ``offload="optimizer"``.

Parameters and gradients remain on the device. A step copies the states of some parameters at a
time to the device, updates these parameters there, and copies the states back: the device holds
the states of one chunk. Each parameter is updated by the optimizer's own code on the device, so
the result is the same bit for bit. The optimizer remains the same object.
"""

import functools
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ..checkpoint.sharded_tensor import is_sharded
from ..optim.gradients import parameters_of
from ..optim.whole_norms import local_part

CHUNK_BYTES = 64 << 20  # of parameters whose states are on the device at the same time

_offloaded: "weakref.WeakKeyDictionary[Optimizer, OffloadedStates]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _GroupPart:
    """Some parameters of one of the optimizer's groups."""

    group: dict[str, Any]
    parameters: list[torch.Tensor]


@dataclass(frozen=True)
class _Held:
    """A state that ``load_state_dict`` must not copy to the device."""

    tensor: torch.Tensor


def check_offload(offload: str | None, optimizer: Optimizer | None) -> None:
    """Raise ValueError where there is no optimizer whose states could be offloaded."""
    if offload == "optimizer" and optimizer is None:
        raise ValueError(
            "world.distribute: offload='optimizer' needs the optimizer. HINT: model, optimizer = "
            "world.distribute(model, optimizer, offload='optimizer')"
        )


def offload_states(optimizer: Optimizer, device: torch.device) -> None:
    """Keep the optimizer's states in the host's memory from now on.

    Args:
        device: The device of its parameters. The host's memory is pinned if it is a GPU.
    """
    if optimizer not in _offloaded:
        _offloaded[optimizer] = OffloadedStates(optimizer, device)


def placed_on_host(optimizer: Optimizer, state: Any) -> Any:
    """Return a state in the host's memory, if the states of this optimizer lie there."""
    offloaded = _offloaded.get(optimizer)
    return state if offloaded is None else offloaded.placed(state)


class OffloadedStates:
    """The states of one optimizer, in the host's memory between steps.

    States without dimensions, such as the number of steps, remain where the optimizer puts them.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._device = device
        self._pins = device.type != "cpu"
        step = type(optimizer).step
        # without the hooks, which run once for each step of the script
        self._step_parameters = getattr(step, "__wrapped__", step)
        # Others may compute a state from all parameters together.
        self._is_per_parameter = step.__module__.startswith("torch.optim.")
        optimizer.step = types.MethodType(self._hooked_step(), optimizer)  # type: ignore[method-assign]
        optimizer.register_load_state_dict_pre_hook(_hold_states)
        optimizer.register_load_state_dict_post_hook(self._take_states)
        _change_tensors(optimizer.state.values(), self.placed)

    def placed(self, state: Any) -> Any:
        """Return a state with its tensors in the host's memory."""

        def place(tensor: torch.Tensor) -> torch.Tensor:
            part = local_part(tensor)
            is_placed = part.device.type == "cpu" and (part.is_pinned() or not self._pins)
            return tensor if is_placed else self._on_host(tensor, waits=True)

        return tree_map_only(torch.Tensor, lambda t: place(t) if t.dim() else t, state)

    def _hooked_step(self) -> Any:
        @functools.wraps(self._step_parameters)
        def step(optimizer: Optimizer, *args: Any, **options: Any) -> Any:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # as a scheduler's wrapper
            return self._step(optimizer, args, options)

        hooked: Any = Optimizer.profile_hook_step(step)
        hooked._wrapped_by_lr_sched = True
        return hooked

    def _step(self, optimizer: Optimizer, args: Any, options: Any) -> Any:
        """Step the parameters of one chunk after the other."""
        groups = optimizer.param_groups
        whole = [_GroupPart(group, group["params"]) for group in groups]
        has_closure = any(argument is not None for argument in (*args, *options.values()))
        chunks = [whole]
        if self._is_per_parameter and not has_closure:
            chunks = _divide(whole) or chunks
        result = None
        try:
            for chunk in chunks:
                optimizer.param_groups = [part.group for part in chunk]
                for part in chunk:
                    part.group["params"] = part.parameters
                result = self._step_on_device(optimizer, args, options)
        finally:
            optimizer.param_groups = groups
            for part in whole:
                part.group["params"] = part.parameters
            if self._pins:  # the host may read the states from here on
                torch.cuda.current_stream(self._device).synchronize()
        return result

    def _step_on_device(self, optimizer: Optimizer, args: Any, options: Any) -> Any:
        """Step the optimizer's present parameters with their states on the device."""
        parameters = parameters_of(optimizer)
        # by id of a tensor on the device: this tensor, and the one on the host
        homes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def fetch(home: torch.Tensor) -> torch.Tensor:
            part = local_part(home).to(self._device, non_blocking=True, copy=True)
            fetched = _like(home, part)
            homes[id(fetched)] = fetched, home
            return fetched

        def put_back(tensor: torch.Tensor) -> torch.Tensor:
            _, home = homes.get(id(tensor), (None, None))
            part = local_part(tensor)
            if home is None or (home.shape, home.dtype) != (tensor.shape, tensor.dtype):
                return self._on_host(tensor, waits=False)
            local_part(home).copy_(part, non_blocking=True)
            return home

        try:
            _change_tensors((optimizer.state[p] for p in parameters if p in optimizer.state), fetch)
            return self._step_parameters(optimizer, *args, **options)
        finally:
            states = [optimizer.state[p] for p in parameters if p in optimizer.state]
            _change_tensors(states, put_back)

    def _on_host(self, tensor: torch.Tensor, *, waits: bool) -> torch.Tensor:
        """Return a copy in new memory of the host."""
        part = local_part(tensor)
        host = torch.empty_like(part, device="cpu", pin_memory=self._pins)
        return _like(tensor, host.copy_(part, non_blocking=not waits))

    def _take_states(self, optimizer: Optimizer) -> None:
        """Place the states that ``load_state_dict`` has left alone."""
        for parameter, state in list(optimizer.state.items()):

            def take(held: _Held, of: Any = parameter) -> Any:
                is_cast = isinstance(of, torch.Tensor) and of.is_floating_point()
                return self.placed(held.tensor.to(of.dtype) if is_cast else held.tensor)

            optimizer.state[parameter] = tree_map_only(_Held, take, state)


def _hold_states(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict whose tensors ``load_state_dict`` does not copy to the device."""
    hold = functools.partial(tree_map_only, torch.Tensor, lambda t: _Held(t) if t.dim() else t)
    return {**state_dict, "state": {key: hold(of) for key, of in state_dict["state"].items()}}


def _change_tensors(states: Iterable[Any], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the tensors with dimensions in the states of some parameters."""
    for state in states:
        for name, value in state.items() if isinstance(state, dict) else ():
            state[name] = tree_map_only(torch.Tensor, lambda t: change(t) if t.dim() else t, value)


def _like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return ``part``, as this rank's part of a distributed tensor if ``tensor`` is one."""
    if not is_sharded(tensor):
        return part
    from torch.distributed.tensor import DTensor

    # DTensor.from_local would copy it to the device of the mesh
    return DTensor(part, tensor._spec, requires_grad=False)


def _divide(whole: Iterable[_GroupPart]) -> list[list[_GroupPart]]:
    """Return chunks of the parameters with gradients, each of at most CHUNK_BYTES or one of them.

    A parameter without a gradient has no step.
    """
    chunks: list[list[_GroupPart]] = []
    room = 0
    for of in whole:
        for parameter in of.parameters:
            if parameter.grad is None:
                continue
            size = local_part(parameter).nbytes
            if not chunks or size > room:
                chunks.append([])
                room = CHUNK_BYTES
            room -= size
            if not chunks[-1] or chunks[-1][-1].group is not of.group:
                chunks[-1].append(_GroupPart(of.group, []))
            chunks[-1][-1].parameters.append(parameter)
    return chunks
