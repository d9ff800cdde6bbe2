"""The names of ``horovod.common.util`` that scripts use."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from ..core.built import ccl_built as ccl_built
from ..core.built import ddl_built as ddl_built
from ..core.built import gloo_built as gloo_built
from ..core.built import mpi_built as mpi_built
from ..core.built import nccl_built as nccl_built


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework is installed for which there is an interface."""
    known = ("torch", "tensorflow", "keras")
    return ext_base_name in known and find_spec(ext_base_name) is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether collectives of a framework run on GPUs."""
    return ext_base_name == "torch" and torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """Return the items in consecutive parts, the first of which have at most one more."""
    most, more = divmod(len(items), parts)
    ends = [most * (n + 1) + min(n + 1, more) for n in range(parts)]
    return [items[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def is_iterable(value: object) -> bool:
    try:
        iter(value)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


@contextmanager
def env(**values: str | None) -> Iterator[None]:
    """Set environment variables for the body of a ``with`` statement. None: leave it as it is."""
    given = {name: value for name, value in values.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
