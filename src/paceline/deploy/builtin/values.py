"""Values of the graph while it is translated, and the operations that change their layout."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .operations import COPY, FILL, Operation, OperationList

Shape = tuple[int, ...]
MAX_COPY_DIMS = 8


class UnsupportedError(ValueError):
    """The builtin backend can't compute the model; the message says why."""


@dataclass(frozen=True)
class Value:
    """A value of each sample.

    Attributes:
        slot: Where it lies.
        shape: Its shape, without the batch.
        channels_last: Whether the first dimension, the channels, changes fastest in memory.
    """

    slot: int
    shape: Shape
    channels_last: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def row_major_strides(shape: Shape) -> Shape:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def strides_of(value: Value) -> Shape:
    """Return the strides of a value in its layout."""
    if not value.channels_last:
        return row_major_strides(value.shape)
    inner = row_major_strides((*value.shape[1:], value.shape[0]))
    return (inner[-1], *inner[:-1])


def copy(
    built: OperationList,
    source: int,
    dest: int,
    steps: Sequence[tuple[int, int, int]],
    source_offset: int = 0,
    dest_offset: int = 0,
) -> None:
    """Append a copy between slots; steps: size, stride in the source and in the destination."""
    merged: list[tuple[int, int, int]] = []
    for size, a, b in (step for step in steps if step[0] != 1):
        if merged and merged[-1][1] == a * size and merged[-1][2] == b * size:
            merged[-1] = (merged[-1][0] * size, a, b)
        else:
            merged.append((size, a, b))
    if len(merged) > MAX_COPY_DIMS:
        raise UnsupportedError("a tensor with too many dimensions")
    words: list[int | float] = [source_offset, dest_offset, len(merged)]
    words += [word for step in merged for word in step]
    built.operations.append(Operation(COPY, 0, source, dest, words))


def strided_copy(
    built: OperationList, value: Value, shape: Shape, strides: Sequence[int], offset: int = 0
) -> Value:
    """Return a row-major copy of elements of a value: shape, and strides in the value's memory."""
    dest = built.new_slot(math.prod(shape))
    steps = list(zip(shape, strides, row_major_strides(shape), strict=True))
    copy(built, value.slot, dest, steps, offset)
    return Value(dest, shape)


def row_major(built: OperationList, value: Value) -> Value:
    """Return the value in row-major order."""
    if not value.channels_last:
        return value
    if value.shape[0] == 1 or math.prod(value.shape[1:]) == 1:  # same memory
        return Value(value.slot, value.shape)
    return strided_copy(built, value, value.shape, strides_of(value))


def channels_last(built: OperationList, value: Value) -> Value:
    """Return the value with its first dimension, the channels, last in memory."""
    if value.channels_last:
        return value
    if value.shape[0] == 1 or math.prod(value.shape[1:]) == 1:
        return Value(value.slot, value.shape, True)
    order = (*range(1, len(value.shape)), 0)
    strides = row_major_strides(value.shape)
    shape = tuple(value.shape[d] for d in order)
    moved = strided_copy(built, value, shape, [strides[d] for d in order])
    return Value(moved.slot, value.shape, True)


def permute(built: OperationList, value: Value, order: Sequence[int]) -> Value:
    """Return the value with its dimensions in another order."""
    strides = strides_of(value)
    shape = tuple(value.shape[d] for d in order)
    wanted = [strides[d] for d in order]
    seen = [s for s, n in zip(wanted, shape, strict=True) if n > 1]
    if seen == [s for s, n in zip(row_major_strides(shape), shape, strict=True) if n > 1]:
        return Value(value.slot, shape)  # same memory
    return strided_copy(built, value, shape, wanted)


def expand(built: OperationList, value: Value, shape: Shape) -> Value:
    """Return the value broadcast to a shape."""
    if value.shape == shape:
        return value
    own = (1,) * (len(shape) - len(value.shape)) + value.shape
    strides = (0,) * (len(shape) - len(value.shape)) + strides_of(value)
    steps = [0 if a == 1 and b != 1 else s for a, b, s in zip(own, shape, strides, strict=True)]
    return strided_copy(built, value, shape, steps)


def fill(built: OperationList, slot: int, number: float) -> None:
    """Append the filling of a whole slot."""
    words: list[int | float] = [0, built.slots[slot], float(number)]
    built.operations.append(Operation(FILL, 0, slot, slot, words))


def concatenate(built: OperationList, values: Sequence[Value], axis: int) -> Value:
    """Return the values joined along a dimension of the sample."""
    rank = len(values[0].shape)
    last = all(value.channels_last for value in values) and rank > 1
    sizes = [value.shape[axis] for value in values]
    shape = tuple(sum(sizes) if d == axis else size for d, size in enumerate(values[0].shape))
    whole = Value(built.new_slot(math.prod(shape)), shape, last)
    strides = strides_of(whole)
    at = 0
    for value, size in zip(values, sizes, strict=True):
        steps = list(zip(value.shape, strides_of(value), strides, strict=True))
        if last:
            steps = [*steps[1:], steps[0]]
        copy(built, value.slot, whole.slot, steps, 0, at * strides[axis])
        at += size
    return whole


def periodic(tensor: torch.Tensor, shape: Shape, last: bool) -> tuple[torch.Tensor, int]:
    """Return a constant as the shortest run of numbers that repeats over a value of ``shape``.

    Args:
        last: Whether the value is channels last.
    """
    whole = tensor.expand(shape)
    if last:
        whole = whole.movedim(0, -1)
    while whole.dim() and (whole.shape[0] == 1 or whole.stride(0) == 0):
        whole = whole[0]
    return whole.contiguous().reshape(-1), max(1, whole.numel())
