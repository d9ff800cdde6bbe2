"""State trees: what may stand in a checkpoint, and how its tensors are shared out over ranks.

A tree is made of dicts, lists, tuples, sets, numbers, strings, bytes, None, tensors and numpy
arrays. It is cut into a skeleton, in which tensors are numbered, and the list of tensors.
Only such types are written, so that loading needs no code of anybody's (weights_only).
"""

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

_TENSOR = "__paceline_tensor__"
_ARRAY = "__paceline_array__"
_DEQUE = "__paceline_deque__"
MAX_DEPTH = 200
MAX_PARTS = 50_000_000
_DTYPES = {
    **{f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bool": 1,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)


def flatten(tree: Any, path: str = "state") -> tuple[Any, list[torch.Tensor]]:
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


class SkeletonError(ValueError):
    """A skeleton that ``cut`` has not made."""


def unflatten(skeleton: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the tree again, from what ``cut`` gave.

    Raises:
        SkeletonError: The skeleton is too deep or too large, or names what is not there.
    """
    return _Joining(tensors).whole(skeleton, 0)


class _Joining:
    """One skeleton; counts its parts, as a list in a file may hold another one many times."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self.left = MAX_PARTS

    def whole(self, part: Any, depth: int) -> Any:
        self.left -= 1
        if depth > MAX_DEPTH or self.left < 0:
            raise SkeletonError(f"a state of over {MAX_DEPTH} levels or {MAX_PARTS:,} parts")
        if isinstance(part, dict):
            if _TENSOR in part:
                return self.tensor(part[_TENSOR])
            if _ARRAY in part:
                return self.array(part[_ARRAY])
            if _DEQUE in part:
                return deque(self.each(part[_DEQUE], depth))
            return {key: self.whole(item, depth + 1) for key, item in part.items()}
        if type(part) in (list, tuple):
            return type(part)(self.each(part, depth))
        if type(part) is set:
            if not all(isinstance(item, Hashable) for item in part):
                raise SkeletonError("a set of what can't be in one")
            return set(self.each(part, depth))
        return part

    def each(self, items: Any, depth: int) -> list[Any]:
        if not isinstance(items, list | tuple | set):
            raise SkeletonError(f"a {type(items).__name__} where a list should be")
        return [self.whole(item, depth + 1) for item in items]

    def tensor(self, number: Any) -> torch.Tensor:
        if type(number) is not int or not 0 <= number < len(self.tensors):
            raise SkeletonError(f"tensor {number!r:.40} of {len(self.tensors)}")
        return self.tensors[number]

    def array(self, found: Any) -> Any:
        dtype, numbered = found if type(found) is tuple and len(found) == 2 else ("", None)
        if not isinstance(dtype, str) or dtype not in _DTYPES or not isinstance(numbered, dict):
            raise SkeletonError(f"an array of type {dtype!r:.40}")
        tensor = self.tensor(numbered.get(_TENSOR)).detach().resolve_conj().resolve_neg()
        size = _DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if tensor.layout is not torch.strided or size != _DTYPES[dtype]:
            raise SkeletonError(f"an array of type {dtype} from a {tensor.dtype}")
        return tensor.numpy().view(dtype)


def assign_owners(tensors: Sequence[torch.Tensor], ranks: int) -> list[int]:
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


def copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the CPU's memory that training can't change any more."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()
