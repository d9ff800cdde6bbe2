"""State that all ranks restore alike, and whether it is equal on all ranks when it is saved.

Each rank writes some of the tensors, so ranks that differ would write a mixture. Therefore ranks
compare a digest of each part (a model, an optimizer, a kept object) before a save. A part that is
rank 0's by choice is not compared, and rank 0 writes all of it. Of a DTensor each rank writes its
piece, so shape and placement are compared, and of copies of a piece the content (``shard_copies``).
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from . import state_tree
from .shard_copies import DIGEST_BYTES, PartPath, ShardDigests, add_tensor, tensor_digest
from .sharded_tensor import (
    Copies,
    Piece,
    PieceError,
    SavedTensor,
    copies_in_mesh,
    describe,
    is_piece,
    is_sharded,
)

Add = Callable[[bytes], None]  # adds bytes to a digest


class Difference(NamedTuple):
    """Ranks on which a part differs from rank 0's, and whether some rank does not have it."""

    ranks: list[int]
    absent: bool


class SharedState:
    """The tree of one rank, split into parts that are compared, and into numbered tensors.

    Attributes:
        skeleton: The tree with numbers in place of tensors.
        tensors: The tensors, not copied.
    """

    def __init__(
        self,
        tree: dict[Any, Any],
        rank_0: Iterable[PartPath] = (),
        rank_0_addresses: frozenset[int] = frozenset(),
        copies: Copies = copies_in_mesh,
    ) -> None:
        """Split a tree.

        Args:
            tree: Dict of trees. The items of a dict or list in it are parts of their own.
            rank_0: Parts of which rank 0's state is saved, without comparison.
            rank_0_addresses: The same, for single tensors by their address.
            copies: Returns the ranks that hold this rank's part of a DTensor.

        Raises:
            ValueError: A value can't be saved; the message names its position.
        """
        self.skeleton, self.tensors = state_tree.flatten(tree, allow_sharded=True)
        self._parts = dict(_parts(self.skeleton))
        chosen = set(rank_0)
        self._rank_0 = {path for path in self._parts if path in chosen or path[:1] in chosen}
        self._rank_0_addresses = rank_0_addresses
        self.copies = copies

    def digests(self) -> dict[PartPath, bytes]:
        """Return a digest of each part that must be equal on all ranks.

        Large tensors are read twice, on their device.
        """
        return self._digests(self._add_content)

    def structures(self) -> dict[PartPath, bytes]:
        """Return a digest of names, shapes and dtypes of each part that must be equal."""
        return self._digests(self._add_structure, values=False)

    def shard_digests(self) -> ShardDigests:
        """Return digests of the shards of DTensors that other ranks hold too."""
        found = ShardDigests(self.copies)
        for path, part in self._parts.items():
            if path not in self._rank_0:
                for keys, number in state_tree.tensor_paths(part):
                    tensor = self.tensors[number]
                    if is_sharded(tensor):
                        found.add(path, keys, tensor)
        return found

    def take_from_rank_0(self, paths: Iterable[PartPath]) -> None:
        """Save rank 0's state of these parts, though they were compared."""
        self._rank_0.update(paths)

    def assign(self, ranks: int) -> list[int]:
        """Number the tensors in the order that all ranks agree on; return who writes each.

        Parts of rank 0 come last, as they may have other tensors on other ranks.
        """
        paths = sorted(self._parts, key=repr)
        equal = [self._parts[path] for path in paths if path not in self._rank_0]
        replicated = state_tree.renumber(equal, self.tensors)
        others = [self._parts[path] for path in paths if path in self._rank_0]
        of_rank_0 = state_tree.renumber(others, self.tensors, len(replicated))
        self.tensors = [*replicated, *of_rank_0]
        owner = state_tree.assign_owners(replicated, ranks)
        owner = [0 if self._is_of_rank_0(i) else rank for i, rank in enumerate(owner)]
        return owner + [0] * len(of_rank_0)

    def _is_of_rank_0(self, number: int) -> bool:
        tensor = self.tensors[number]
        if is_sharded(tensor) or tensor.layout is not torch.strided:
            return False
        if tensor.is_nested or not tensor.numel():
            return False
        return tensor.data_ptr() in self._rank_0_addresses

    def _digests(
        self, add_tensor: Callable[[Add, int], None], values: bool = True
    ) -> dict[PartPath, bytes]:
        digests = {}
        for path, part in self._parts.items():
            if path not in self._rank_0:
                content = hashlib.blake2b(digest_size=DIGEST_BYTES)
                _add_part(part, content.update, partial(add_tensor, content.update), values)
                digests[path] = content.digest()
        return digests

    def _add_structure(self, add: Add, number: int) -> None:
        tensor = self.tensors[number]
        add(f"{tensor.dtype} {tuple(tensor.shape)};".encode())

    def _add_content(self, add: Add, number: int) -> None:
        tensor = self.tensors[number]
        if self._is_of_rank_0(number):
            add(b"rank 0")
        elif is_sharded(tensor):
            add(describe(tensor).encode())
        else:
            add_tensor(tensor, add)


def differences(digests: list[dict[PartPath, bytes]]) -> dict[PartPath, Difference]:
    """Return the parts that are not equal on all ranks; ``digests`` has one dict for each rank."""
    found = {}
    for path in dict.fromkeys(path for own in digests for path in own):
        each = [own.get(path) for own in digests]
        ranks = [rank for rank, digest in enumerate(each) if digest != each[0]]
        if ranks:
            found[path] = Difference(ranks, None in each)
    return found


def _parts(skeleton: dict[Any, Any]) -> Iterator[tuple[PartPath, Any]]:
    for name, value in skeleton.items():
        if isinstance(value, dict) and state_tree.tensor_of(value) is None:
            yield from (((name, key), item) for key, item in value.items())
        elif isinstance(value, list):
            yield from (((name, i), item) for i, item in enumerate(value))
        else:
            yield (name,), value


def _add_part(part: Any, add: Add, tensor: Callable[[int], None], values: bool = True) -> None:
    """Add the types and values of a skeleton to a digest; equal trees add equal bytes.

    Without ``values``, numbers and other leaves count by their types.
    """
    number = state_tree.tensor_of(part)
    if number is not None:
        tensor(number)
    elif isinstance(part, dict):
        add(b"dict %d;" % len(part))
        for key in sorted(part, key=repr):
            add(repr(key).encode())
            _add_part(part[key], add, tensor, values)
    elif type(part) in (list, tuple):
        add(b"%s %d;" % (type(part).__name__.encode(), len(part)))
        for item in part:
            _add_part(item, add, tensor, values)
    elif not values:
        add(f"{type(part).__name__};".encode())
    elif type(part) is set:
        add(repr(sorted(map(repr, part))).encode())
    else:
        add(f"{type(part).__name__} {part!r};".encode())


OWNED = "owned"  # key in the state of a rank


def new_piece(shape: Iterable[int], offset: Iterable[int], tensor: torch.Tensor) -> Piece:
    """Return a part of a tensor, for the state of a rank."""
    return {"shape": tuple(shape), "offset": tuple(offset), "tensor": tensor.detach()}


def merge_owned(shared: Any, own: list[Any]) -> None:
    """Add to the state of all ranks the parts of models and optimizers that single ranks saved.

    Raises:
        PieceError: Pieces do not form a whole tensor, or the parts do not belong to the state.
    """
    sections = [state[OWNED] for state in own if isinstance(state, dict) and state.get(OWNED)]
    for name in dict.fromkeys(name for section in sections for name in section):
        given = [section[name] for section in sections if name in section]
        count = len(shared.get(name, ()))
        if any(not isinstance(section, list) or len(section) != count for section in given):
            raise PieceError(f"the ranks have saved other {name} than the state has")
        for i in range(count):
            shared[name][i] = _merged(
                shared[name][i], [section[i] for section in given if section[i]]
            )


def _merged(shared: Any, parts: list[dict[Any, Any]]) -> Any:
    if not parts:
        return shared
    if "param_groups" not in shared:
        return {**shared, **_joined_each(parts)}
    states = [part["state"] for part in parts]
    numbers = dict.fromkeys(number for of in states for number in of)
    joined = {n: _joined_each([of[n] for of in states if n in of]) for n in numbers}
    return {**shared, "state": dict(sorted({**shared["state"], **joined}.items()))}


def _joined_each(parts: list[dict[Any, Any]]) -> dict[Any, Any]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _joined(name, [part[name] for part in parts if name in part]) for name in names}


def _joined(name: Any, values: list[Any]) -> Any:
    """Return the whole tensor of pieces; another value as it is, which must be equal on all."""
    if all(isinstance(value, list) and value and all(map(is_piece, value)) for value in values):
        values = [piece for value in values for piece in value]  # several of one rank
    first = values[0]
    if not isinstance(first, dict):
        if not all(_is_equal(first, value) for value in values[1:]):
            raise PieceError(
                f"several ranks have saved {name!r:.80}, and it differs. HINT: load an earlier "
                "checkpoint, and have the script compute the same value on all ranks"
            )
        return first
    if not all(map(is_piece, values)):
        raise PieceError("a part of a tensor is invalid")
    return SavedTensor.of(values)


def _is_equal(a: Any, b: Any) -> bool:
    """Return whether two trees are equal. Within them, nan is equal to nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (torch.Tensor, np.ndarray)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        if isinstance(a, torch.Tensor) and (a.layout is not torch.strided or a.is_quantized):
            return tensor_digest(a) == tensor_digest(b)
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    if isinstance(a, set):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    return bool(a == b or (a != a and b != b))
