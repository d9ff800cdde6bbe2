"""State trees: the values that a checkpoint can hold, and the assignment of tensors to ranks.

A tree consists of dicts, lists, tuples, sets, deques, numbers, strings, bytes, None, tensors and
NumPy arrays. For saving it is split into a skeleton, in which tensors are replaced by numbers, and
the list of tensors. No other types are allowed, so that loading executes no code (weights_only).
"""

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch

from .sharded_tensor import SavedTensor, is_sharded, piece_of

_TENSOR = "__paceline_tensor__"
_ARRAY = "__paceline_array__"
_DEQUE = "__paceline_deque__"
_MARKERS = frozenset((_TENSOR, _ARRAY, _DEQUE))
MAX_DEPTH = 200
MAX_PARTS = 50_000_000
MAX_INTEGER_BITS = 2039  # torch.load(weights_only=True) reads no longer integers
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
_SPARSE_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_SPARSE_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)
_LAYOUTS = (torch.strided, torch.sparse_coo, *_SPARSE_ROWS, *_SPARSE_COLUMNS)
_KEYS = (int, float, str, bytes, bool, type(None))
_VALUES_HINT = "return from state_dict() numbers, strings, tensors, arrays and containers of them"


def flatten(
    tree: Any, path: str = "state", allow_sharded: bool = False
) -> tuple[Any, list[torch.Tensor]]:
    """Return ``(skeleton, tensors)`` of a tree. Tensors are not copied; NumPy arrays are.

    Args:
        tree: The tree.
        path: Name of the tree in error messages.
        allow_sharded: Whether tensors may be DTensors, which are not gathered.

    Raises:
        ValueError: A value can't be saved, or could not be loaded again; the message names its
            position.
    """
    tensors: list[torch.Tensor] = []

    def number(value: torch.Tensor, path: str) -> dict[str, int]:
        if allow_sharded and is_sharded(value):
            piece_of(value, path)  # raises for what can't be saved
            tensors.append(value.detach())
        else:
            tensors.append(_plain_tensor(value, path))
        return {_TENSOR: len(tensors) - 1}

    return _walk(tree, path, number, 0), tensors


def _walk(value: Any, path: str, number: Callable[[torch.Tensor, str], Any], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise _unsupported(path, f"on level {depth}", f"nest at most {MAX_DEPTH} levels")
    if isinstance(value, torch.Tensor):
        return number(value, path)
    if isinstance(value, (Counter, OrderedDict, defaultdict, dict)):
        return {
            _key(key, path): _walk(item, f"{path}[{key!r}]", number, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, deque):
        return {_DEQUE: _walk_each(value, path, number, depth)}
    if type(value) in (list, tuple):
        return type(value)(_walk_each(value, path, number, depth))
    if type(value) is set:
        try:
            return set(_walk_each(value, path, number, depth))
        except TypeError:  # a tensor or an array is no item of a set here
            raise _unsupported(path, "a set of tensors or arrays", "use a list of them") from None
    return _array(value, path, number) if _is_numpy(value, "ndarray") else _scalar(value, path)


def _walk_each(
    items: Iterable[Any], path: str, number: Callable[[torch.Tensor, str], Any], depth: int
) -> list[Any]:
    return [_walk(item, f"{path}[{i}]", number, depth + 1) for i, item in enumerate(items)]


def _scalar(value: Any, path: str) -> Any:
    plain = value.item() if _is_numpy(value, "generic") else value
    if type(plain) not in _PLAIN:
        kind = f"a {type(value).__module__}.{type(value).__qualname__}"
        raise _unsupported(path, f"{kind} (loading it would need code)", _VALUES_HINT)
    if type(plain) is int and plain.bit_length() > MAX_INTEGER_BITS:
        reason = f"an integer of over {MAX_INTEGER_BITS} bits"
        raise _unsupported(path, reason, "keep it as bytes: value.to_bytes(...)")
    return plain


def _key(key: Any, path: str) -> Any:
    if type(key) is not tuple and isinstance(key, tuple):
        key = tuple(key)
    plain = key.item() if _is_numpy(key, "generic") else key
    if type(plain) is tuple:
        return tuple(_key(part, path) for part in plain)
    long = type(plain) is int and plain.bit_length() > MAX_INTEGER_BITS
    if type(plain) not in _KEYS or long or plain in _MARKERS:
        shown = f"integer of over {MAX_INTEGER_BITS} bits" if long else repr(key)
        raise ValueError(
            f"{path} has the key {shown}, which a checkpoint can't hold. "
            "HINT: use numbers and strings as keys"
        )
    return plain


def _array(value: Any, path: str, number: Callable[[torch.Tensor, str], Any]) -> Any:
    dtype = str(value.dtype)
    if dtype not in _DTYPES:
        raise _unsupported(
            path, f"an array of dtype {dtype}", f"convert it to one of {', '.join(_DTYPES)}"
        )
    view = value if dtype not in ("uint16", "uint32", "uint64") else value.view(dtype[1:])
    return {_ARRAY: (dtype, number(torch.from_numpy(view.copy()), path))}


def _plain_tensor(value: torch.Tensor, path: str) -> torch.Tensor:
    """Return the tensor without gradient and attributes, if the file of a shard can hold it."""
    if torch.nn.parameter.is_lazy(value):
        raise _unsupported(path, "uninitialized", "run one forward before world.epochs")
    tensor = value.detach()
    if type(tensor) is not torch.Tensor:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise _unsupported(
            path, f"a {kind}", "keep a plain tensor, such as full_tensor() of a DTensor"
        )
    if tensor.is_meta:
        raise _unsupported(
            path, "on the device meta, which has no values", "allocate the tensor first"
        )
    if tensor.layout not in _LAYOUTS:
        raise _unsupported(path, f"a tensor of layout {tensor.layout}", "keep tensor.to_dense()")
    return tensor


def _is_numpy(value: Any, kind: str) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, getattr(numpy, kind))


def _unsupported(path: str, what: str, hint: str) -> ValueError:
    return ValueError(f"{path} is {what}, which a checkpoint can't hold. HINT: {hint}")


class SkeletonError(ValueError):
    """A skeleton that ``flatten`` does not produce."""


def unflatten(skeleton: Any, tensors: Sequence[torch.Tensor | SavedTensor]) -> Any:
    """Return the tree of a skeleton and its tensors; the inverse of ``flatten``.

    Raises:
        SkeletonError: The skeleton is too deep, too large or invalid, or refers to missing tensors.
    """
    return _Joining(tensors).whole(skeleton, 0)


class _Joining:
    """Conversion of one skeleton to a tree.

    The parts are counted, because a list in a file may contain the same list many times.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | SavedTensor]) -> None:
        self.tensors = tensors
        self.left = MAX_PARTS
        self.used: set[int] = set()  # each tensor is restored, and copied, once

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
                raise SkeletonError("a set with an item that a set can't contain")
            return set(self.each(part, depth))
        return part

    def each(self, items: Any, depth: int) -> list[Any]:
        if not isinstance(items, list | tuple | set):
            raise SkeletonError(f"a {type(items).__name__} where a list should be")
        return [self.whole(item, depth + 1) for item in items]

    def tensor(self, number: Any) -> torch.Tensor | SavedTensor:
        if type(number) is not int or not 0 <= number < len(self.tensors):
            raise SkeletonError(f"tensor {number!r:.40} of {len(self.tensors)}")
        if number in self.used:
            raise SkeletonError(f"tensor {number} in two places")
        self.used.add(number)
        return self.tensors[number]

    def array(self, found: Any) -> Any:
        dtype, numbered = found if type(found) is tuple and len(found) == 2 else ("", None)
        if not isinstance(dtype, str) or dtype not in _DTYPES or not isinstance(numbered, dict):
            raise SkeletonError(f"an array of type {dtype!r:.40}")
        saved = self.tensor(numbered.get(_TENSOR))
        if isinstance(saved, SavedTensor):
            raise SkeletonError(f"an array of type {dtype} in pieces")
        tensor = saved.detach().resolve_conj().resolve_neg()
        size = _DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if tensor.layout is not torch.strided or size != _DTYPES[dtype]:
            raise SkeletonError(f"an array of type {dtype} from a {tensor.dtype}")
        return tensor.numpy().view(dtype)


def tensor_of(part: Any) -> int | None:
    """Return the number of the tensor that a part of a skeleton stands for, if it is one."""
    return part[_TENSOR] if isinstance(part, dict) and _TENSOR in part else None


def renumber(
    parts: Iterable[Any], tensors: Sequence[torch.Tensor], first: int = 0
) -> list[torch.Tensor]:
    """Number the tensors in parts of a skeleton anew, in place; return them in this order.

    The order is that of ``parts``, and of sorted keys in a dict. So equal parts have equal numbers
    on all ranks, whatever the order of their dicts. ``first`` is the first number.
    """
    ordered: list[torch.Tensor] = []
    for part in parts:
        for _, marker in _markers(part, ()):
            ordered.append(tensors[marker[_TENSOR]])
            marker[_TENSOR] = first + len(ordered) - 1
    return ordered


def tensor_paths(part: Any) -> list[tuple[tuple[Any, ...], int]]:
    """Return the keys and the number of each tensor in a part of a skeleton, in a fixed order."""
    return [(keys, marker[_TENSOR]) for keys, marker in _markers(part, ())]


def _markers(part: Any, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], dict[str, int]]]:
    if tensor_of(part) is not None:
        yield keys, part
    elif isinstance(part, dict):
        for key in sorted(part, key=repr):
            yield from _markers(part[key], (*keys, key))
    elif isinstance(part, list | tuple):
        for i, item in enumerate(part):
            yield from _markers(item, (*keys, i))


def assign_owners(tensors: Sequence[torch.Tensor], ranks: int) -> list[int]:
    """Return the rank that writes each replicated tensor; 0 for one that is in pieces.

    Tensors are assigned in order of decreasing size, each to the rank with the fewest bytes. The
    result depends only on the sizes, so it is the same on every rank.
    """
    load = [0] * ranks
    owner = [0] * len(tensors)
    sizes = [sum(part.nbytes for part in dense_parts(tensor)) for tensor in tensors]
    replicated = [i for i, tensor in enumerate(tensors) if not is_sharded(tensor)]
    for index in sorted(replicated, key=lambda i: (-sizes[i], i)):
        rank = load.index(min(load))
        owner[index] = rank
        load[rank] += sizes[index]
    return owner


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors that hold the content of a tensor of any layout."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.is_quantized:
        return [tensor.int_repr()]
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in _SPARSE_ROWS:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
