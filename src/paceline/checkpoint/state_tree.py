"""State trees: the values that a checkpoint can hold, and the assignment of tensors to ranks.

A tree consists of dicts, lists, tuples, sets, deques, numbers, strings, bytes, None, tensors and
NumPy arrays. For saving it is split into a skeleton, in which tensors are replaced by numbers, and
the list of tensors. No other types are allowed, so that loading executes no code (weights_only).
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
    """Return ``(skeleton, tensors)`` of a tree. Tensors are not copied; NumPy arrays are.

    Args:
        tree: The tree.
        path: Name of the tree in error messages.

    Raises:
        ValueError: A value can't be saved; the message names its position.
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
    """A skeleton that ``flatten`` does not produce."""


def unflatten(skeleton: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the tree of a skeleton and its tensors; the inverse of ``flatten``.

    Raises:
        SkeletonError: The skeleton is too deep, too large or invalid, or refers to missing tensors.
    """
    return _Joining(tensors).whole(skeleton, 0)


class _Joining:
    """Conversion of one skeleton to a tree.

    The parts are counted, because a list in a file may contain the same list many times.
    """

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
    """Return the rank that writes each replicated tensor.

    Tensors are assigned in order of decreasing size, each to the rank with the fewest bytes. The
    result depends only on the sizes, so it is the same on every rank.
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
    """Return a copy in CPU memory, which training no longer modifies."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()
