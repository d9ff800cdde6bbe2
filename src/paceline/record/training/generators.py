"""States of random number generators: checksums, and code that leaves them as they are."""

import random
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def generator_states() -> dict[str, int]:
    """Return a checksum of the state of each global generator of this process."""
    found = {"torch": zlib.crc32(torch.random.get_rng_state().numpy())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = zlib.crc32(torch.cuda.get_rng_state().numpy())
    if "numpy" in sys.modules:
        _, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = zlib.crc32(repr(rest).encode(), zlib.crc32(keys))
    found["python"] = zlib.crc32(repr(random.getstate()).encode())
    return found


@contextmanager
def kept_generators(*owners: Any) -> Iterator[None]:
    """Restore the global generators afterwards, and those in ``owners``' attribute ``generator``."""
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
