"""State trees: what may stand in a checkpoint, and how its tensors are shared out over ranks.

A tree is made of dicts, lists, tuples, sets, numbers, strings, bytes, None, tensors and numpy
arrays. It is cut into a skeleton, in which tensors are numbered, and the list of tensors.
Only such types are written, so that loading needs no code of anybody's (weights_only).
"""

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

_TENSOR = "__paceline_tensor__"
_ARRAY = "__paceline_array__"
_DEQUE = "__paceline_deque__"
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)


def cut(tree: Any, path: str = "state") -> tuple[Any, list[torch.Tensor]]:
    """``(skeleton, tensors)`` of a tree; the tensors are the tree's own, not copies.

    Raises ValueError that names the place of a value that can't be saved.
    """
    tensors: list[torch.Tensor] = []

    def number(tensor: torch.Tensor) -> dict[str, int]:
        tensors.append(tensor)
        return {_TENSOR: len(tensors) - 1}

    return _walk(tree, path, number), tensors


def _walk(value: Any, path: str, number: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return number(value.detach())
    if isinstance(value, (Counter, OrderedDict, defaultdict, dict)):
        return {
            _key(key, path): _walk(item, f"{path}[{key!r}]", number) for key, item in value.items()
        }
    if isinstance(value, deque):
        return {_DEQUE: [_walk(v, f"{path}[{i}]", number) for i, v in enumerate(value)]}
    if type(value) in (list, tuple, set):
        return type(value)(_walk(v, f"{path}[{i}]", number) for i, v in enumerate(value))
    if type(value) in _PLAIN:
        return value
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.generic):
        return value.item()
    if numpy and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        unsigned = str(value.dtype)
        view = value if unsigned not in ("uint16", "uint32", "uint64") else value.view(unsigned[1:])
        return {_ARRAY: (unsigned, number(torch.from_numpy(view.copy())))}
    raise ValueError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        "can't hold (loading it would need code). HINT: let state_dict() give numbers, strings, "
        "tensors, arrays and containers of them"
    )


def _key(key: Any, path: str) -> Any:
    if isinstance(key, (int, float, str, bytes, bool, type(None))):
        return key
    if isinstance(key, tuple):
        return tuple(_key(part, path) for part in key)
    raise ValueError(
        f"{path} has the key {key!r}, which a checkpoint can't hold. HINT: numbers and strings"
    )


def join(skeleton: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The tree again, from what ``cut`` gave."""
    if isinstance(skeleton, dict):
        if _TENSOR in skeleton:
            return tensors[skeleton[_TENSOR]]
        if _ARRAY in skeleton:
            dtype, numbered = skeleton[_ARRAY]
            return join(numbered, tensors).numpy().view(dtype)
        if _DEQUE in skeleton:
            return deque(join(item, tensors) for item in skeleton[_DEQUE])
        return {key: join(item, tensors) for key, item in skeleton.items()}
    if type(skeleton) in (list, tuple, set):
        return type(skeleton)(join(item, tensors) for item in skeleton)
    return skeleton


def owners(tensors: Sequence[torch.Tensor], ranks: int) -> list[int]:
    """Which rank writes which replicated tensor: the largest first, to the least loaded rank.

    A function of the sizes alone, so every rank finds the same answer.
    """
    load = [0] * ranks
    owner = [0] * len(tensors)
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    for index in sorted(range(len(tensors)), key=lambda i: (-sizes[i], i)):
        rank = load.index(min(load))
        owner[index] = rank
        load[rank] += sizes[index]
    return owner


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the CPU's memory that training can't change any more."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()
