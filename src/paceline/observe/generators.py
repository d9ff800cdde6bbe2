"""States of random number generators: checksums, and code that leaves them as they are."""

import functools
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from .user_lines import is_users_file, users_frames

MAX_NESTED_DATASETS = 4
Accessors = dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]  # get and set, by name


def generator_states() -> dict[str, int]:
    """Return a checksum of the state of each global generator of this process."""
    return _checksums(_global_generators())


def owned_states(owner: Any) -> dict[str, int]:
    """Return a checksum of the state of each generator that a dataset, or one inside of it, has.

    Names are such as "numpy:rng" of the attribute ``rng``.
    """
    found: dict[str, int] = {}
    for _ in range(MAX_NESTED_DATASETS):
        attributes = dict(getattr(owner, "__dict__", {}))
        for name in [name for name in attributes if "transform" in name]:
            inner = getattr(attributes[name], "__dict__", {})
            attributes |= {f"{name}.{key}": value for key, value in inner.items()}
        found |= _checksums(_generators_in(attributes))
        found |= function_states(getattr(type(owner), "__getitem__", None))
        owner = attributes.get("dataset")
    return found


def function_states(function: Any) -> dict[str, int]:
    """Return a checksum of the state of each generator among the globals of a user's function."""
    around = getattr(function, "__globals__", {})
    is_users = is_users_file(str(around.get("__file__", "")))
    return _checksums(_generators_in(around)) if is_users else {}


def script_states() -> dict[str, int]:
    """Return the same of the generators among the variables of the script's functions that run."""
    return _checksums(_generators_in(_script_variables()))


def saved_generators() -> dict[str, Any]:
    """Return the states of the global generators, and of those among the script's variables."""
    known = _global_generators() | _generators_in(_script_variables())
    return {name: get() for name, (get, _) in known.items()}


def restore_generators(states: Mapping[str, Any]) -> None:
    """Set generators to states that ``saved_generators`` returned, in this or another process."""
    known = _global_generators() | _generators_in(_script_variables())
    for name, (_, restore) in known.items():
        if name in states:
            restore(states[name])


@contextmanager
def kept_generators(*owners: Any) -> Iterator[None]:
    """Restore the global generators afterwards, and those that are ``owners``' ``generator``."""
    owned = {str(at): getattr(owner, "generator", None) for at, owner in enumerate(owners)}
    known = _global_generators() | _generators_in(owned)
    states = {name: get() for name, (get, _) in known.items()}
    try:
        yield
    finally:
        for name, (_, restore) in known.items():
            restore(states[name])


def _global_generators() -> Accessors:
    found: Accessors = {"torch": (torch.random.get_rng_state, torch.random.set_rng_state)}
    if torch.cuda.is_initialized():
        found["cuda"] = (torch.cuda.get_rng_state, torch.cuda.set_rng_state)
    numbers = functools.partial(np.random.get_state, legacy=False)
    return found | {
        "numpy": (numbers, np.random.set_state),
        "python": (random.getstate, random.setstate),
    }


def _generators_in(variables: Mapping[str, Any]) -> Accessors:
    """Return the generators among some variables, by "KIND:NAME"."""
    found: Accessors = {}
    for name, value in list(variables.items()):
        match value:
            case torch.Generator():
                found[f"torch:{name}"] = (value.get_state, value.set_state)
            case random.Random():
                found[f"python:{name}"] = (value.getstate, value.setstate)
            case np.random.Generator():
                bits = value.bit_generator
                get, restore = (functools.partial(f, bits, "state") for f in (getattr, setattr))
                found[f"numpy:{name}"] = (get, restore)
            case np.random.RandomState():
                state = functools.partial(value.get_state, legacy=False)
                found[f"numpy:{name}"] = (state, value.set_state)
    return found


def _script_variables() -> dict[str, Any]:
    """Return the variables of the script's functions that run, those of the outer ones last."""
    found: dict[str, Any] = {}
    for frame in users_frames():
        found = dict(frame.f_locals) | found
        found |= frame.f_globals
    return found


def _checksums(generators: Accessors) -> dict[str, int]:
    return {name: _checksum(get()) for name, (get, _) in generators.items()}


def _checksum(state: Any, before: int = 0) -> int:
    if isinstance(state, torch.Tensor):
        state = state.numpy()
    if isinstance(state, np.ndarray):
        return zlib.crc32(state.tobytes(), before)
    if isinstance(state, dict):
        for value in state.values():
            before = _checksum(value, before)
        return before
    return zlib.crc32(repr(state).encode(), before)
