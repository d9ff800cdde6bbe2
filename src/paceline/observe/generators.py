"""States of random number generators: checksums, and code that leaves them as they are."""

import random
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .user_lines import is_users_file, users_frames

MAX_NESTED_DATASETS = 4


def generator_states() -> dict[str, int]:
    """Return a checksum of the state of each global generator of this process."""
    found = {"torch": _crc(torch.random.get_rng_state())}
    if torch.cuda.is_initialized():
        found["cuda"] = _crc(torch.cuda.get_rng_state())
    if "numpy" in sys.modules:
        _, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = zlib.crc32(repr(rest).encode(), zlib.crc32(keys))
    found["python"] = zlib.crc32(repr(random.getstate()).encode())
    return found


def _crc(state: torch.Tensor) -> int:
    return zlib.crc32(state.numpy().tobytes())


def owned_states(owner: Any) -> dict[str, int]:
    """Return a checksum of the state of each generator that a dataset, or one inside of it, has.

    Names are such as "numpy:rng" of the attribute ``rng``.
    """
    found: dict[str, int] = {}
    for _ in range(MAX_NESTED_DATASETS):
        attributes = getattr(owner, "__dict__", {})
        for name, value in list(attributes.items()):
            found |= _state_of(name, value)
            if "transform" in name:
                for inner, other in list(getattr(value, "__dict__", {}).items()):
                    found |= _state_of(f"{name}.{inner}", other)
        found |= function_states(getattr(type(owner), "__getitem__", None))
        owner = attributes.get("dataset")
    return found


def function_states(function: Any) -> dict[str, int]:
    """Return a checksum of the state of each generator among the globals of a user's function."""
    around = getattr(function, "__globals__", {})
    if not is_users_file(str(around.get("__file__", ""))):
        return {}
    return _states_in(around)


def script_states() -> dict[str, int]:
    """Return the same of the generators among the variables of the script's functions that run."""
    return {
        name: checksum
        for name, value in _script_variables().items()
        for name, checksum in _state_of(name, value).items()
    }


def _script_variables() -> dict[str, Any]:
    """Return the variables of the script's functions that run, those of the outer ones last."""
    found: dict[str, Any] = {}
    for frame in users_frames():
        found = dict(frame.f_locals) | found
        found |= frame.f_globals
    return found


def _states_in(variables: Mapping[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, value in list(variables.items()):
        found |= _state_of(name, value)
    return found


def _state_of(name: str, value: Any) -> dict[str, int]:
    found = _accessors(value)
    if found is None:
        return {}
    kind, get, _ = found
    state = get()
    plain = state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state).encode()
    return {f"{kind}:{name}": zlib.crc32(plain)}


def _accessors(value: Any) -> tuple[str, Callable[[], Any], Callable[[Any], Any]] | None:
    """Return the kind of a generator, and what gets and sets its state; None for other values."""
    if isinstance(value, torch.Generator):
        return "torch", value.get_state, value.set_state
    if isinstance(value, random.Random):
        return "python", value.getstate, value.setstate
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return "numpy", lambda: bits.state, lambda state: setattr(bits, "state", state)
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return "numpy", lambda: value.get_state(legacy=False), value.set_state
    return None


def saved_generators() -> dict[str, Any]:
    """Return the states of the global generators, and of those among the script's variables."""
    found: dict[str, Any] = {"torch": torch.random.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.get_state()
    for name, value in _script_variables().items():
        if (one := _accessors(value)) is not None:
            kind, get, _ = one
            found[f"{kind}:{name}"] = get()
    return found


def restore_generators(states: Mapping[str, Any]) -> None:
    """Set generators to states that ``saved_generators`` returned, in this or another process."""
    torch.random.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
    for name, value in _script_variables().items():
        one = _accessors(value)
        if one is not None and (state := states.get(f"{one[0]}:{name}")) is not None:
            one[2](state)


@contextmanager
def kept_generators(*owners: Any) -> Iterator[None]:
    """Restore the global generators afterwards, and those that are ``owners``' ``generator``."""
    owned = [one for owner in owners if (one := getattr(owner, "generator", None)) is not None]
    states = [one.get_state() for one in owned if isinstance(one, torch.Generator)]
    plain, python = torch.random.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    numbers = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.random.set_rng_state(plain)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numbers)
        kept = [one for one in owned if isinstance(one, torch.Generator)]
        for generator, state in zip(kept, states, strict=True):
            generator.set_state(state)
