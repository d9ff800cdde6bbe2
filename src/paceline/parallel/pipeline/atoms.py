"""Which modules of a model a pipeline does not divide further: its atoms.

They do not depend on the number of stages, and neither do the random numbers of the modules.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..blocks import WITHOUT_FORWARD, nbytes_of

MAX_SHARE = 16  # a module with more than this fraction of the parameters' bytes is divided further


@dataclass(frozen=True)
class Atoms:
    """Atoms by name, in order of registration; a module with two names is there twice."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> "Atoms":
        """Return the atoms of a model."""
        return cls(tuple(_find(model, "", max(nbytes_of(model) // MAX_SHARE, 1))))


def _find(module: nn.Module, name: str, limit: int) -> Iterator[str]:
    if name and _is_atom(module, limit):
        yield name
        return
    for key, child in module._modules.items():
        if child is not None:
            yield from _find(child, f"{name}.{key}" if name else key, limit)


def _is_atom(module: nn.Module, limit: int) -> bool:
    if isinstance(module, WITHOUT_FORWARD):
        return False
    is_small = nbytes_of(module) <= limit or not any(True for _ in module.children())
    has_own_forward = "forward" in vars(module)  # such as a block that recomputes
    special = isinstance(module, (nn.MultiheadAttention, torch.jit.ScriptModule))
    return is_small or has_own_forward or special


def tensors_by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by their names; tied ones once, under their first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def tensor_names(model: nn.Module) -> dict[str, str]:
    """Return the name in ``tensors_by_name`` of each name of a parameter or buffer."""
    first = {id(t): name for name, t in reversed(tensors_by_name(model).items())}
    every = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: first[id(t)] for name, t in every}
