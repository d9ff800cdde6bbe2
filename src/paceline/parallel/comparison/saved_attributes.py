"""Buffers and other attributes of modules, which a forward may change.

Code may keep what it computes: a running mean, losses in a list, a cache. Values are found in
lists, dicts, sets and objects of any depth, but not in ``__slots__``, in datasets, or outside of
the model.
"""

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

# of nn.Module itself, such as parameters and hooks
_OF_MODULES = frozenset(vars(nn.Module())) - {"_buffers", "_non_persistent_buffers_set", "training"}
_NOT_FOLLOWED = (
    *(nn.Parameter, Dataset, type, types.ModuleType, types.FunctionType, types.MethodType),
    *(torch.dtype, torch.device, str, bytes, int, float, type(None)),
)
_PACKAGES = frozenset(
    {"torch", "paceline", "numpy", "threading", "logging", "concurrent", "lightning"}
    | {"pytorch_lightning"}
)


class SavedAttributes:
    """The attributes of modules at one time."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._spaces: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._generators: list[tuple[Any, Any]] = []
        self._seen: dict[int, Any] = {}  # by id, so that no object is freed meanwhile
        waiting: list[Any] = list(modules)
        while waiting:
            value = waiting.pop()
            if isinstance(value, _NOT_FOLLOWED) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            waiting += self._save(value)

    def _save(self, value: Any) -> Iterable[Any]:
        """Save a value, and return what it holds."""
        if isinstance(value, torch.Tensor):
            self._save_tensor(value)
        elif isinstance(value, torch.Generator):
            self._generators.append((value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._generators.append((value.setstate, value.getstate()))
        elif _is_of_numpy(value, "random", "Generator"):
            bits = value.bit_generator
            self._generators.append((functools.partial(setattr, bits, "state"), bits.state))
        elif _is_of_numpy(value, "ndarray"):
            self._arrays.append((value, value.copy()))
        elif isinstance(value, (list, dict, set, deque)):
            copy = dict(value) if isinstance(value, dict) else list(value)
            self._containers.append((value, copy))
            yield from copy.values() if isinstance(copy, dict) else copy
        elif isinstance(value, (tuple, frozenset)):
            yield from value
        if isinstance(value, nn.Module) or _is_followed(value):
            own = vars(value)
            saved = {name: one for name, one in own.items() if not _is_of_module(value, name)}
            self._spaces.append((own, saved))
            yield from saved.values()

    def _save_tensor(self, value: torch.Tensor) -> None:
        tensor = getattr(value, "local", value)  # of a tensor that is divided over ranks
        if tensor.layout is torch.strided:
            self._tensors.append((tensor, tensor.detach().clone()))

    def restore(self) -> None:
        """Restore the attributes: the same objects with the same contents."""
        for own, saved in self._spaces:
            for name in own.keys() - saved.keys() - _OF_MODULES:
                del own[name]
            own.update(saved)
        for container, copy in self._containers:
            if not _is_same(container, copy):
                container.clear()
                is_sequence = isinstance(container, (list, deque))
                (container.extend if is_sequence else container.update)(copy)
        with torch.no_grad():
            for tensor, before in self._tensors:
                if type(tensor) is not torch.Tensor or not torch.equal(tensor, before):
                    tensor.copy_(before)
        for array, before in self._arrays:
            array[...] = before
        for give, state in self._generators:
            give(state)


def _is_same(container: Any, copy: Any) -> bool:
    """Return whether a container has the same objects in the same order."""
    if len(container) != len(copy):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), copy.items(), strict=True)
        return all(a[0] is b[0] and a[1] is b[1] for a, b in pairs)
    return all(a is b for a, b in zip(container, copy, strict=True))


def _is_of_module(owner: Any, name: str) -> bool:
    return isinstance(owner, nn.Module) and name in _OF_MODULES


def _is_of_numpy(value: Any, *path: str) -> bool:
    """Return whether a value has a class of NumPy, and can be changed."""
    if type(value).__module__.partition(".")[0] != "numpy":
        return False
    kind: Any = sys.modules["numpy"]
    for name in path:
        kind = getattr(kind, name)
    return type(value) is kind and (path != ("ndarray",) or value.flags.writeable)


def _is_followed(value: Any) -> bool:
    """Return whether an object is one of the script's, with attributes."""
    package = type(value).__module__.partition(".")[0]
    return package not in _PACKAGES and isinstance(getattr(value, "__dict__", None), dict)
