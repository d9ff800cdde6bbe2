"""Translate the graph of ``torch.export`` into a list of operations."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.nn import functional

from .operations import CONVOLUTION, LINEAR, MATRICES, POOL, POOLS, Operation
from .rules_of_values import binary, normalize, softmax  # registers its rules, too
from .translation import Builtin, Translation, rule, three_sizes
from .values import (
    UnsupportedError,
    Value,
    channels_last,
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

# Rules for operators that move elements, and for those that do nothing at inference.


@rule("dropout", "alpha_dropout", "feature_dropout", "clone", "contiguous", "detach", "alias")
def _identity(t: Translation, node: Node) -> Value:
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


def _along_axis(
    t: Translation, value: Value, axis: int, begin: int, count: int, step: int = 1
) -> Value:
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
    if any(isinstance(bound, Node) for bound in (start, end)):
        raise UnsupportedError("a slice of a symbolic size")
    numbers = range(size)[slice(start, end, step)]
    return _along_axis(t, value, axis, numbers.start, len(numbers), step)


@rule("select")
def _select(t: Translation, node: Node) -> Value:
    value = t.value(node, 0)
    axis = t.axis(node, t.argument(node, 1))
    index = t.argument(node, 2) % value.shape[axis]
    return Value(_along_axis(t, value, axis, index, 1).slot, t.shape(node))


@rule("narrow")
def _narrow(t: Translation, node: Node) -> Value:
    axis = t.axis(node, t.argument(node, 1))
    return _along_axis(t, t.value(node, 0), axis, t.argument(node, 2), t.argument(node, 3))


@rule("split", "split_with_sizes", "chunk", "unbind", "tensor_split")
def _split(t: Translation, node: Node) -> tuple[Value, ...]:
    value = t.value(node, 0)
    name = str(node.target).split(".")[1]
    axis = t.axis(node, t.argument(node, 1 if name == "unbind" else 2, "dim", 0))
    parts, at = [], 0
    for meta in node.meta["val"]:
        shape = t.sample_shape(meta)
        count = 1 if name == "unbind" else shape[axis]
        parts.append(Value(_along_axis(t, value, axis, at, count).slot, shape))
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
    for part in t.argument(node, 0):
        held = t.held.get(part)
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
    if any(not isinstance(size, int) or size < 0 for size in pads) or len(pads) // 2 > len(
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


# Rules for layers with weights, pooling, interpolation and attention.


def linear(t: Translation, value: Value, weight: torch.Tensor, bias: torch.Tensor | None) -> Value:
    """Append a product of the last dimension with weights [outputs, inputs]."""
    value = row_major(t.built, value)
    outputs, k = weight.shape
    rows = value.elements // k
    words: list[int | float] = [rows, k, outputs, t.built.store(weight), t.built.store(bias)]
    slot = t.built.add(LINEAR, 0, value.slot, rows * outputs, words)
    return Value(slot, (*value.shape[:-1], outputs))


@rule("linear")
def _linear(t: Translation, node: Node) -> Value:
    weight = t.constant(node, 1)
    assert weight is not None
    return linear(t, t.value(node, 0), weight, t.constant(node, 2, "bias"))


@rule("addmm")
def _addmm(t: Translation, node: Node) -> Value:
    weight, bias = t.constant(node, 2), t.constant(node, 0)
    if len(node.args) > 3 or node.kwargs or weight is None or bias is None:
        raise UnsupportedError("addmm with factors")
    return linear(t, t.value(node, 1), weight.t(), bias.expand(weight.shape[1]))


@rule("mm", "matmul", "bmm")
def _matmul(t: Translation, node: Node) -> Value:
    a, b = (t.held.get(factor) for factor in node.args[:2])  # type: ignore[arg-type]
    if isinstance(a, Value) and isinstance(b, torch.Tensor):
        if b.dim() != 2:
            raise UnsupportedError("a product with weights of more than two dimensions")
        return linear(t, a, b.t(), None)
    if not isinstance(a, Value) or not isinstance(b, Value):
        raise UnsupportedError("a product whose first factor is constant")
    return matrices(t, a, b)


def matrices(t: Translation, a: Value, b: Value) -> Value:
    """Append the products of the matrices of two values: their last two dimensions."""
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[:-2] != b.shape[:-2]:
        raise UnsupportedError("a product of vectors, or with broadcasting")
    a, b = row_major(t.built, a), row_major(t.built, b)
    groups, (m, k), n = math.prod(a.shape[:-2]), a.shape[-2:], b.shape[-1]
    slot = t.built.new_slot(groups * m * n)
    words: list[int | float] = [groups, m, k, n]
    t.built.operations.append(Operation(MATRICES, 0, a.slot, slot, words, b.slot, 0))
    return Value(slot, (*a.shape[:-1], n))


@rule("scaled_dot_product_attention")
def _attention(t: Translation, node: Node) -> Value:
    query, key, value = (t.value(node, i) for i in (0, 1, 2))
    options = [
        t.argument(node, i, name)
        for i, name in ((3, "attn_mask"), (4, "dropout_p"), (5, "is_causal"))
    ]
    if any(options) or node.kwargs.get("enable_gqa") or len(query.shape) < 2:
        raise UnsupportedError("attention with a mask or dropout")
    scale = node.kwargs.get("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    query = binary(t, "multiply", query, torch.tensor(scale, dtype=t.dtype), query.shape)
    last = len(key.shape) - 1
    scores = matrices(t, query, permute(t.built, key, [*range(last - 1), last, last - 1]))
    return matrices(t, softmax(t, scores), value)


def _geometry(
    value: Value,
    shape: Any,
    channels: int,
    groups: int,
    sizes: dict[str, list[int]],
) -> list[int | float]:
    rank = len(value.shape) - 1
    inside, outside = three_sizes(value.shape[1:], rank, 1), three_sizes(shape[1:], rank, 1)
    words: list[int | float] = [value.shape[0], channels, groups, *inside, *outside]
    for name, default in (("kernel", 1), ("stride", 1), ("pad", 0), ("dilation", 1), ("up", 1)):
        words += three_sizes(sizes.get(name, [default] * rank), rank, default)
    return words


def convolution(
    t: Translation,
    value: Value,
    shape: Any,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: int,
    sizes: dict[str, list[int]],
) -> Value:
    """Append a convolution with weights [outputs, channels / groups, ...]."""
    value = channels_last(t.built, value)
    words = _geometry(value, shape, weight.shape[0], groups, sizes)
    moved = weight.movedim(1, -1)  # as patches lie
    words += [t.built.store(moved), t.built.store(bias)]
    slot = t.built.add(CONVOLUTION, 0, value.slot, math.prod(shape), words)
    return Value(slot, shape, True)


def _per_dimension(given: Any, rank: int) -> list[int]:
    numbers = [given] if isinstance(given, int) else list(given)
    return numbers * rank if len(numbers) == 1 else numbers


def _unbatched(t: Translation, node: Node, rank: int) -> None:
    if len(t.value(node, 0).shape) != rank + 1:
        raise UnsupportedError(f"{node.target} of a tensor without batch")


@rule("conv1d", "conv2d", "conv3d")
def _conv(t: Translation, node: Node) -> Value:
    rank = int(str(node.target).split(".")[1][4])
    _unbatched(t, node, rank)
    weight, bias = t.constant(node, 1), t.constant(node, 2, "bias")
    assert weight is not None
    stride, padding, dilation = (
        t.argument(node, i, name, d)
        for i, name, d in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    kernel = list(weight.shape[2:])
    dilation = _per_dimension(dilation, rank)
    if padding == "same":
        padding = [d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True)]
    padding = [0] * rank if padding == "valid" else _per_dimension(padding, rank)
    sizes = {
        "kernel": kernel,
        "stride": _per_dimension(stride, rank),
        "pad": padding,
        "dilation": dilation,
    }
    groups = t.argument(node, 6, "groups", 1)
    return convolution(t, t.value(node, 0), t.shape(node), weight, bias, groups, sizes)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(t: Translation, node: Node) -> Value:
    """Translate into a convolution with flipped weights, of the values with ``stride`` - 1 zeros
    between them.
    """
    rank = int(str(node.target).split(".")[1][14])
    _unbatched(t, node, rank)
    weight, bias = t.constant(node, 1), t.constant(node, 2, "bias")
    assert weight is not None
    groups = t.argument(node, 6, "groups", 1)
    stride, padding, dilation = (
        _per_dimension(t.argument(node, i, name, d), rank)
        for i, name, d in ((3, "stride", 1), (4, "padding", 0), (7, "dilation", 1))
    )
    kernel = list(weight.shape[2:])
    pad = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    inputs, each = weight.shape[0], weight.shape[1]
    turned = weight.flip(tuple(range(2, 2 + rank))).reshape(groups, inputs // groups, each, *kernel)
    turned = turned.transpose(1, 2).reshape(groups * each, inputs // groups, *kernel)
    value, shape = t.value(node, 0), t.shape(node)
    lines = list(zip(value.shape[1:], shape[1:], kernel, stride, padding, strict=True))
    phases = [_phases(*line) for line in lines]
    if max(stride) > 1 and max(dilation) == 1 and all(phases):
        return _by_phases(t, value, shape, turned, bias, groups, phases)
    sizes = {"kernel": kernel, "pad": pad, "dilation": dilation, "up": stride}
    return convolution(t, value, shape, turned, bias, groups, sizes)


@dataclass(frozen=True)
class _Phase:
    """Every ``step``-th output position of a transposed convolution along one dimension, from
    ``first``: a convolution of the values without zeros between them, with every ``step``-th
    weight."""

    first: int
    step: int
    count: int
    weights: slice
    pad: int


def _phases(size: int, wanted: int, kernel: int, stride: int, padding: int) -> list[_Phase]:
    """Return the phases along one dimension; none if one has no weights, or if the values are so
    few that ``builtin.c`` would take its weights for an error."""
    found = []
    for first in range(min(stride, wanted)):
        skipped = (first + padding) % stride
        weights = slice((kernel - 1 - skipped) % stride, None, stride)
        taps = len(range(skipped, kernel, stride))
        pad = taps - 1 - (first + padding) // stride
        if not taps or taps > size + 2 * max(pad, 0):
            return []
        count = len(range(first, wanted, stride))
        found.append(_Phase(first, stride, count, weights, pad))
    return found


def _by_phases(
    t: Translation,
    value: Value,
    shape: Any,
    turned: torch.Tensor,
    bias: torch.Tensor | None,
    groups: int,
    phases: list[list[_Phase]],
) -> Value:
    """Append one convolution for each phase, and copies that put their results between each
    other."""
    value = channels_last(t.built, value)
    whole = Value(t.built.new_slot(math.prod(shape)), shape, True)
    _, *strides = strides_of(whole)
    for chosen in itertools.product(*phases):
        weight = turned[(slice(None), slice(None), *(phase.weights for phase in chosen))]
        sizes = {"kernel": list(weight.shape[2:]), "pad": [phase.pad for phase in chosen]}
        own = (shape[0], *(phase.count for phase in chosen))
        part = convolution(t, value, own, weight, bias, groups, sizes)
        _, *steps = strides_of(part)
        moves = [
            (phase.count, a, phase.step * b)
            for phase, a, b in zip(chosen, steps, strides, strict=True)
        ]
        start = sum(phase.first * b for phase, b in zip(chosen, strides, strict=True))
        copy(t.built, part.slot, whole.slot, [*moves, (shape[0], 1, 1)], 0, start)
    return whole


def pool(t: Translation, value: Value, shape: Any, kind: str, sizes: dict[str, list[int]]) -> Value:
    value = channels_last(t.built, value)
    words = _geometry(value, shape, value.shape[0], 1, sizes)
    slot = t.built.add(POOL, POOLS.index(kind), value.slot, math.prod(shape), words)
    return Value(slot, shape, True)


@rule(*(f"{kind}_pool{rank}d" for kind in ("max", "avg") for rank in (1, 2, 3)))
def _pool(t: Translation, node: Node) -> Value:
    name = str(node.target).split(".")[1]
    rank, largest = int(name[8]), name.startswith("max")
    _unbatched(t, node, rank)
    kernel = _per_dimension(t.argument(node, 1), rank)
    stride = _per_dimension(t.argument(node, 2, "stride") or kernel, rank)
    padding = _per_dimension(t.argument(node, 3, "padding", 0), rank)
    if largest:
        dilation, ceil = t.argument(node, 4, "dilation", 1), t.argument(node, 5, "ceil_mode")
        kind = "max"
    else:
        dilation, ceil = 1, t.argument(node, 4, "ceil_mode")
        kind = "mean_with_padding" if t.argument(node, 5, "count_include_pad", True) else "mean"
        if t.argument(node, 6, "divisor_override"):
            raise UnsupportedError("pooling with a divisor")
    if ceil or any(size != 1 for size in _per_dimension(dilation, rank)):
        raise UnsupportedError("pooling with dilation or ceil_mode")
    sizes = {"kernel": kernel, "stride": stride, "pad": padding}
    return pool(t, t.value(node, 0), t.shape(node), kind, sizes)


@rule(*(f"adaptive_avg_pool{rank}d" for rank in (1, 2, 3)))
def _adaptive(t: Translation, node: Node) -> Value:
    value, shape = t.value(node, 0), t.shape(node)
    if len(value.shape) != len(shape) or any(
        a % b for a, b in zip(value.shape[1:], shape[1:], strict=True)
    ):
        raise UnsupportedError("adaptive pooling to a size that does not divide the input")
    kernel = [a // b for a, b in zip(value.shape[1:], shape[1:], strict=True)]
    return pool(t, value, shape, "mean", {"kernel": kernel, "stride": kernel})


def _affine(t: Translation, value: Value, weight: Any, bias: Any, shape: Any) -> Value:
    for name, constant in (("multiply", weight), ("add", bias)):
        if constant is not None:
            value = binary(t, name, value, constant.reshape(shape), value.shape)
    return value


@rule("batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm")
def _batch_norm(t: Translation, node: Node) -> Any:
    single = "legit" not in str(node.target)
    if single and t.argument(node, 5):
        raise UnsupportedError("batch normalization in training mode")
    weight, bias, mean, variance = (t.constant(node, i) for i in (1, 2, 3, 4))
    if mean is None or variance is None:
        raise UnsupportedError("batch normalization without running statistics")
    epsilon = float(node.args[7 if single else 6])  # type: ignore[arg-type]
    scale = (variance.double() + epsilon).rsqrt() * (1.0 if weight is None else weight.double())
    shift = (0.0 if bias is None else bias.double()) - mean.double() * scale
    value = t.value(node, 0)
    ones = (-1, *(1,) * (len(value.shape) - 1))
    value = _affine(t, value, scale.to(t.dtype), shift.to(t.dtype), ones)
    return value if single else (value, None, None)


@rule("layer_norm", "native_layer_norm")
def _layer_norm(t: Translation, node: Node) -> Any:
    value, shape = t.value(node, 0), tuple(t.argument(node, 1))
    epsilon = t.argument(node, 4, "eps", 1e-5)
    value = normalize(t, value, value.elements // math.prod(shape), epsilon)
    value = _affine(t, value, t.constant(node, 2, "weight"), t.constant(node, 3, "bias"), shape)
    return (value, None, None) if "native" in str(node.target) else value


@rule("group_norm")
def _group_norm(t: Translation, node: Node) -> Value:
    value, groups = t.value(node, 0), t.argument(node, 1)
    value = normalize(t, value, groups, t.argument(node, 4, "eps", 1e-5))
    ones = (-1, *(1,) * (len(value.shape) - 1))
    return _affine(t, value, t.constant(node, 2, "weight"), t.constant(node, 3, "bias"), ones)


@rule(
    *(
        f"upsample_{kind}"
        for kind in (
            "nearest1d",
            "nearest2d",
            "nearest3d",
            "linear1d",
            "bilinear2d",
            "trilinear3d",
            "bicubic2d",
        )
    )
)
def _upsample(t: Translation, node: Node) -> Value:
    """Nearest neighbours of whole factors are a copy; everything else a product in each
    dimension."""
    value, shape = t.value(node, 0), t.shape(node)
    name = str(node.target).split(".")[1].removeprefix("upsample_")
    whole = all(b % a == 0 for a, b in zip(value.shape[1:], shape[1:], strict=True))
    if name.startswith("nearest") and whole:
        value = channels_last(t.built, value)
        strides = strides_of(value)
        sizes: list[int] = []
        steps: list[int] = []
        for a, b, step in zip(value.shape[1:], shape[1:], strides[1:], strict=True):
            sizes += [a, b // a]
            steps += [step, 0]
        copied = strided_copy(t.built, value, (*sizes, shape[0]), [*steps, 1])
        return Value(copied.slot, shape, True)
    if name.startswith("nearest"):
        raise UnsupportedError("nearest neighbours with a factor that is not whole")
    value = row_major(t.built, value)
    for axis in range(1, len(shape)):
        if value.shape[axis] == shape[axis]:
            continue
        weight = _interpolation(name, value.shape[axis], shape[axis], node)
        order = list(range(len(shape)))
        order[axis], order[-1] = order[-1], order[axis]
        value = permute(
            t.built, linear(t, permute(t.built, value, order), weight.to(t.dtype), None), order
        )
    return value


def _interpolation(name: str, size: int, wanted: int, node: Node) -> torch.Tensor:
    """Return the matrix [wanted, size] of an interpolation along one dimension."""
    align = next(
        (argument for argument in node.args if isinstance(argument, bool)),
        node.kwargs.get("align_corners", False),
    )
    scales = [
        x
        for argument in node.args
        if isinstance(argument, list | tuple)
        for x in argument
        if isinstance(x, float)
    ]
    if any(not float(scale).is_integer() for scale in scales):
        raise UnsupportedError("interpolation with a factor that is not whole")
    unit = torch.eye(size, dtype=torch.float64)[:, None]
    if name == "bicubic2d":
        grid = functional.interpolate(
            unit[..., None, :], (1, wanted), mode="bicubic", align_corners=bool(align)
        )
        return grid[:, 0, 0].t()
    return functional.interpolate(unit, wanted, mode="linear", align_corners=bool(align))[:, 0].t()


def translate(exported: ExportedProgram, dtype: torch.dtype) -> Builtin:
    """Return the builtin backend's data of a model that changes nothing in place.

    Raises:
        UnsupportedError: The builtin backend can't compute the model.
    """
    return Translation(exported, dtype).run()
