"""States of random number generators: checksums, and code that leaves them as they are."""

import random
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from .user_lines import is_users_file

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
    found: dict[str, int] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            found = _states_in(frame.f_locals) | found
            found |= _states_in(frame.f_globals)
        frame = frame.f_back
    return found


def _states_in(variables: Mapping[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, value in list(variables.items()):
        found |= _state_of(name, value)
    return found


def _state_of(name: str, value: Any) -> dict[str, int]:
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        return {f"torch:{name}": _crc(value.get_state())}
    if isinstance(value, random.Random):
        return {f"python:{name}": zlib.crc32(repr(value.getstate()).encode())}
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return {f"numpy:{name}": zlib.crc32(repr(value.bit_generator.state).encode())}
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return {f"numpy:{name}": zlib.crc32(repr(value.get_state(legacy=False)).encode())}
    return {}


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
