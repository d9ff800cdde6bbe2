"""The recorded operators of a deferred construction, and their execution.

Tensors are identified by storage, offset and strides. So views, tied weights and the parameters
made from a tensor need no operator of their own.
"""

from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

_OVERWRITES = {"aten::zero_", "aten::fill_", "aten::copy_"}


class View(NamedTuple):
    """A recorded tensor: a view of the storage with this key."""

    storage: int
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def covers_storage(self) -> bool:
        numel = 1
        for length in self.size:
            numel *= length
        steps = sorted(zip(self.stride, self.size, strict=True))
        expected = 1
        for stride, length in steps:
            if length != 1 and stride != expected:
                return False
            expected *= length
        return numel * self.dtype.itemsize == self.nbytes


class Operator(NamedTuple):
    """A recorded call."""

    func: Any
    args: Any  # with View in place of recorded tensors
    options: Any
    outputs: list[View]
    read: set[int]  # storages
    written: list[View]
    is_random: bool

    @property
    def overwritten(self) -> View | None:
        """The storage that this operator fills without reading it."""
        if len(self.written) != 1 or not self.written[0].covers_storage:
            return None
        name = self.func._schema.name
        fills = self.is_random and not any(isinstance(a, View) for a in self.args[1:])
        return self.written[0] if fills or name in _OVERWRITES else None


class SetState:
    """Set the state of the random number generator, as ``torch.manual_seed`` does."""

    def __init__(self, state: torch.Tensor) -> None:
        self._state = state

    def __call__(self) -> None:
        torch.set_rng_state(self._state)


def is_view(value: Any) -> bool:
    """Return whether a value is a view."""
    return isinstance(value, View)


def draw(operator: Operator) -> None:
    """Advance the random number generator as an operator does, and drop the numbers."""

    def scratch(value: Any) -> Any:
        if not isinstance(value, View):
            return value
        # 0.5: a valid probability and deviation
        return torch.empty_strided(value.size, value.stride, dtype=value.dtype).fill_(0.5)

    args, options = tree_map(scratch, (operator.args, operator.options), is_leaf=is_view)
    with torch.no_grad():
        operator.func(*args, **options)


def needed(operators: list[Operator], wanted: set[int]) -> set[int]:
    """Return the indices of the operators on which the wanted storages depend."""
    live, needed = set(wanted), set()
    for i in range(len(operators) - 1, -1, -1):
        operator = operators[i]
        results = {view.storage for view in (*operator.outputs, *operator.written)}
        if not results & live:
            continue
        needed.add(i)
        overwritten = operator.overwritten
        if overwritten is not None:
            live.discard(overwritten.storage)
        live |= operator.read - ({overwritten.storage} if overwritten else set())
    return needed


def schedule(operators: list[Operator], executed: set[int]) -> list[int]:
    """Return the indices of the random operators and of those to be executed, in a possible order.

    Random operators keep their order. Any other follows directly on the last operator that it
    depends on, so that a tensor is complete early: also one that a loop over all modules scales
    after their construction.
    """
    followers: dict[int, list[int]] = {}
    waiting: dict[int, int] = {}  # number of operators that have to come before
    latest: dict[int, int] = {}  # last operator on a storage
    for i in sorted(executed):
        storages = touched(operators[i])
        before = {latest[storage] for storage in storages if storage in latest}
        waiting[i] = len(before)
        for other in before:
            followers.setdefault(other, []).append(i)
        latest |= dict.fromkeys(storages, i)
    order: dict[int, None] = {}
    for i, operator in enumerate(operators):
        stack = [i] if operator.is_random or i in executed else []
        while stack:
            now = stack.pop()
            if now in order:
                continue
            order[now] = None
            for other in followers.get(now, ()):
                waiting[other] -= 1
                if not waiting[other] and not operators[other].is_random:
                    stack.append(other)
    return list(order)


def touched(operator: Operator) -> set[int]:
    """Return the storages that an operator reads or makes."""
    return operator.read | {view.storage for view in operator.outputs}


def tensor_of(view: View, real: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """Return the tensor of a view, in memory that is made or made larger if necessary."""
    storage = real.setdefault(view.storage, torch.UntypedStorage(0))
    if storage.nbytes() < view.nbytes:
        storage.resize_(view.nbytes)
    return view_of(view, storage)


def view_of(view: View, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the tensor that a view is of this memory."""
    empty = torch.empty(0, dtype=view.dtype, device=storage.device)
    return empty.set_(storage, view.offset, view.size, view.stride)


def execute(operator: Operator, real: dict[int, torch.UntypedStorage]) -> None:
    """Execute an operator on the memory of its storages, and add the memory that it makes.

    Args:
        real: The memory of each storage that was computed and is still needed.
    """

    def resolve(value: Any) -> Any:
        return tensor_of(value, real) if isinstance(value, View) else value

    args, options = tree_map(resolve, (operator.args, operator.options), is_leaf=is_view)
    found = operator.func(*args, **options)
    made = [tensor for tensor in tree_leaves(found) if isinstance(tensor, torch.Tensor)]
    for view, tensor in zip(operator.outputs, made, strict=True):
        if view.storage in operator.read:
            continue
        if tensor.stride() == view.stride and tensor.untyped_storage().nbytes() == view.nbytes:
            real[view.storage] = tensor.untyped_storage()
        else:  # LAPACK's results may have other strides than those of meta tensors
            tensor_of(view, real).copy_(tensor)
