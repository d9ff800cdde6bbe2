"""Rules for operators that move elements, and for those that do nothing at inference."""

from typing import Any

import torch
from torch.fx import Node

from .translation import Translation, rule
from .values import (
    UnsupportedError,
    Value,
    concatenate,
    copy,
    expand,
    fill,
    permute,
    row_major,
    row_major_strides,
    strided_copy,
    strides_of,
)


@rule(
    "dropout",
    "alpha_dropout",
    "feature_dropout",
    "clone",
    "contiguous",
    "detach",
    "alias",
)
def _same(t: Translation, node: Node) -> Value:
    if "dropout" in str(node.target) and t.argument(node, 2):
        raise UnsupportedError("dropout in training mode")
    return t.value(node, 0)


@rule("to", "_to_copy", "type_as", "lift_fresh_copy", "detach_")
def _to(t: Translation, node: Node) -> Value:
    t.shape(node)  # the dtype must be the model's
    return t.value(node, 0)


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")
def _reshape(t: Translation, node: Node) -> Value:
    return Value(row_major(t.built, t.value(node, 0)).slot, t.shape(node))


@rule("permute", "transpose", "movedim", "swapaxes", "mT")
def _permute(t: Translation, node: Node) -> Value:
    value = t.value(node, 0)
    rank = len(value.shape) + 1
    name = str(node.target).split(".")[1]
    if name == "permute":
        order = [d % rank for d in t.argument(node, 1)]
    else:
        order = list(range(rank))
        if name == "movedim":
            marks = torch.empty(tuple(range(1, rank + 1)), device="meta")
            moved = torch.movedim(marks, t.argument(node, 1), t.argument(node, 2))
            order = [int(size) - 1 for size in moved.shape]
        else:
            a, b = (-2, -1) if name == "mT" else (t.argument(node, 1), t.argument(node, 2))
            order[a], order[b] = order[b], order[a]
    if order[0] != 0:
        raise UnsupportedError("a permutation of the batch")
    return permute(t.built, value, [d - 1 for d in order[1:]])


def _part(t: Translation, value: Value, axis: int, begin: int, count: int, step: int = 1) -> Value:
    strides = list(strides_of(value))
    offset = begin * strides[axis]
    strides[axis] *= step
    shape = tuple(count if d == axis else size for d, size in enumerate(value.shape))
    return strided_copy(t.built, value, shape, strides, offset)


@rule("slice")
def _slice(t: Translation, node: Node) -> Value:
    value = t.value(node, 0)
    dim, start, end = (t.argument(node, i) for i in (1, 2, 3))
    step = t.argument(node, 4, "step", 1)
    if (
        not dim
        and not start
        and (end is None or isinstance(end, Node) or end >= 1 << 40)
        and step == 1
    ):
        return value  # all of the batch
    axis = t.axis(node, dim or 0)
    size = value.shape[axis]
    if any(isinstance(one, Node) for one in (start, end)):
        raise UnsupportedError("a slice of a symbolic size")
    numbers = range(size)[slice(start, end, step)]
    return _part(t, value, axis, numbers.start, len(numbers), step)


@rule("select")
def _select(t: Translation, node: Node) -> Value:
    value = t.value(node, 0)
    axis = t.axis(node, t.argument(node, 1))
    index = t.argument(node, 2) % value.shape[axis]
    return Value(_part(t, value, axis, index, 1).slot, t.shape(node))


@rule("narrow")
def _narrow(t: Translation, node: Node) -> Value:
    axis = t.axis(node, t.argument(node, 1))
    return _part(t, t.value(node, 0), axis, t.argument(node, 2), t.argument(node, 3))


@rule("split", "split_with_sizes", "chunk", "unbind", "tensor_split")
def _split(t: Translation, node: Node) -> tuple[Value, ...]:
    value = t.value(node, 0)
    name = str(node.target).split(".")[1]
    axis = t.axis(node, t.argument(node, 1 if name == "unbind" else 2, "dim", 0))
    parts, at = [], 0
    for meta in node.meta["val"]:
        shape = t.sample_shape(meta)
        count = 1 if name == "unbind" else shape[axis]
        parts.append(Value(_part(t, value, axis, at, count).slot, shape))
        at += count
    return tuple(parts)


@rule("cat", "concat", "stack")
def _cat(t: Translation, node: Node) -> Value:
    dim = t.argument(node, 1, "dim", 0)
    shape = t.shape(node)
    axis = dim % (len(shape) + 1) - 1
    if axis < 0:
        raise UnsupportedError("a concatenation of batches")
    values: list[Value] = []
    for one in t.argument(node, 0):
        held = t.held.get(one)
        if not isinstance(held, Value):
            raise UnsupportedError("a concatenation with a constant")
        if "stack" in str(node.target):
            held = row_major(t.built, held)
            held = Value(held.slot, (*held.shape[:axis], 1, *held.shape[axis:]))
        values.append(held)
    return concatenate(t.built, values, axis)


@rule("expand", "expand_as", "broadcast_to", "repeat")
def _expand(t: Translation, node: Node) -> Value:
    value, shape = t.value(node, 0), t.shape(node)
    if "repeat" in str(node.target) and any(
        a not in (1, b) for a, b in zip(value.shape, shape, strict=False)
    ):
        raise UnsupportedError("repeat")
    return expand(t.built, row_major(t.built, value), shape)


@rule("constant_pad_nd", "pad")
def _pad(t: Translation, node: Node) -> Value:
    value, pads = row_major(t.built, t.value(node, 0)), list(t.argument(node, 1))
    constant: Any = t.argument(node, 2)
    number: Any = constant
    if "constant_pad" not in str(node.target):
        if t.argument(node, 2, "mode", "constant") != "constant":
            raise UnsupportedError("padding that is not constant")
        number = t.argument(node, 3, "value")
    if any(not isinstance(one, int) or one < 0 for one in pads) or len(pads) // 2 > len(
        value.shape
    ):
        raise UnsupportedError("negative padding, or padding of the batch")
    shape = t.shape(node)
    slot = t.built.new_slot(Value(0, shape).elements)
    fill(t.built, slot, 0.0 if number is None else float(number))
    strides = row_major_strides(shape)
    first = [0] * len(shape)
    for i in range(len(pads) // 2):
        first[len(shape) - 1 - i] = pads[2 * i]
    steps = list(zip(value.shape, row_major_strides(value.shape), strides, strict=True))
    offset = sum(a * b for a, b in zip(first, strides, strict=True))
    copy(t.built, value.slot, slot, steps, 0, offset)
    return Value(slot, shape)
