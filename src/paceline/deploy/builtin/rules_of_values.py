"""Rules for operators on single elements, reductions and softmax."""

import math
from typing import Any

import torch
from torch.fx import Node

from .operations import (
    BINARIES,
    BINARY,
    NORMALIZE,
    REDUCE,
    REDUCTIONS,
    SOFTMAX,
    UNARIES,
    UNARY,
    Operation,
)
from .translation import Translation, rule
from .values import UnsupportedError, Value, channels_last, expand, periodic, permute, row_major


def unary(t: Translation, value: Value, name: str, p: float = 0.0, q: float = 0.0) -> Value:
    """Append an operator on single elements."""
    n = value.elements
    slot = t.built.add(UNARY, UNARIES.index(name), value.slot, n, [n, float(p), float(q)])
    return Value(slot, value.shape, value.channels_last)


def binary(t: Translation, name: str, a: Value, b: Value | torch.Tensor, shape: Any) -> Value:
    """Append an operator on two values, or a value and a constant, with broadcasting."""
    if isinstance(b, torch.Tensor):
        if b.dim() > len(shape):
            if b.shape[0] != 1:
                raise UnsupportedError("a constant with a batch")
            b = b[0]
        a = expand(t.built, a, shape)
        numbers, period = periodic(b, shape, a.channels_last)
        words: list[int | float] = [a.elements, 0, period, t.built.store(numbers)]
        slot = t.built.add(BINARY, BINARIES.index(name), a.slot, a.elements, words)
        return Value(slot, shape, a.channels_last)
    a, b = expand(t.built, a, shape), expand(t.built, b, shape)
    if a.channels_last != b.channels_last:
        a, b = channels_last(t.built, a), channels_last(t.built, b)
    n = a.elements
    slot = t.built.new_slot(n)
    t.built.operations.append(
        Operation(BINARY, BINARIES.index(name), a.slot, slot, [n, 1, n], b.slot, 3)
    )
    return Value(slot, shape, a.channels_last)


SIMPLE = (
    "relu",
    "tanh",
    "sigmoid",
    "silu",
    "exp",
    "abs",
    "neg",
    "sqrt",
    "reciprocal",
    "sin",
    "cos",
)


@rule(*SIMPLE, "log", "square")
def _simple(t: Translation, node: Node) -> Value:
    name = str(node.target).split(".")[1]
    return unary(t, t.value(node, 0), name)


@rule("leaky_relu")
def _leaky_relu(t: Translation, node: Node) -> Value:
    return unary(t, t.value(node, 0), "leaky_relu", t.argument(node, 1, default=0.01))


@rule("gelu")
def _gelu(t: Translation, node: Node) -> Value:
    approximate = node.kwargs.get("approximate", "none")
    return unary(t, t.value(node, 0), "gelu_tanh" if approximate == "tanh" else "gelu")


@rule("elu")
def _elu(t: Translation, node: Node) -> Value:
    alpha, scale, inner = (t.argument(node, i, default=1.0) for i in (1, 2, 3))
    if inner != 1:
        raise UnsupportedError("elu with an input scale")
    return unary(t, t.value(node, 0), "elu", scale, alpha * scale)


@rule("selu")
def _selu(t: Translation, node: Node) -> Value:
    alpha, scale = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
    return unary(t, t.value(node, 0), "elu", scale, alpha * scale)


@rule("softplus")
def _softplus(t: Translation, node: Node) -> Value:
    beta, threshold = t.argument(node, 1, "beta", 1.0), t.argument(node, 2, "threshold", 20.0)
    return unary(t, t.value(node, 0), "softplus", beta, threshold)


@rule("mish")
def _mish(t: Translation, node: Node) -> Value:
    x = t.value(node, 0)
    return binary(t, "multiply", unary(t, unary(t, x, "softplus", 1.0, 20.0), "tanh"), x, x.shape)


@rule("relu6")
def _relu6(t: Translation, node: Node) -> Value:
    return unary(t, t.value(node, 0), "clamp", 0.0, 6.0)


@rule("hardswish", "hardsigmoid")
def _hard(t: Translation, node: Node) -> Value:
    x = t.value(node, 0)
    moved = binary(t, "add", x, torch.tensor(3.0, dtype=t.dtype), x.shape)
    gate = unary(t, moved, "clamp", 0.0, 6.0)
    gate = binary(t, "divide", gate, torch.tensor(6.0, dtype=t.dtype), x.shape)
    return binary(t, "multiply", gate, x, x.shape) if "swish" in str(node.target) else gate


@rule("clamp", "hardtanh", "clamp_min", "clamp_max")
def _clamp(t: Translation, node: Node) -> Value:
    name = str(node.target).split(".")[1]
    low, high = t.argument(node, 1, "min"), t.argument(node, 2, "max")
    if name.startswith("hardtanh"):
        low, high = t.argument(node, 1, default=-1.0), t.argument(node, 2, default=1.0)
    if name == "clamp_max":
        low, high = None, low
    if isinstance(low, Node) or isinstance(high, Node):
        raise UnsupportedError("clamp with tensors")
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return unary(t, t.value(node, 0), "clamp", low, high)


@rule("pow")
def _power(t: Translation, node: Node) -> Value:
    exponent = t.argument(node, 1)
    if not isinstance(exponent, int | float):
        raise UnsupportedError("a power whose exponent is a tensor")
    names = {2: "square", 0.5: "sqrt", -1: "reciprocal"}
    return unary(t, t.value(node, 0), names.get(exponent, "power"), float(exponent))


@rule("rsqrt")
def _rsqrt(t: Translation, node: Node) -> Value:
    return unary(t, unary(t, t.value(node, 0), "sqrt"), "reciprocal")


REVERSED = {"subtract": "subtract_from", "divide": "divide_into"}
TORCH_BINARIES = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "maximum": "maximum",
    "minimum": "minimum",
    "rsub": "subtract_from",
}


@rule(*TORCH_BINARIES)
def _binary(t: Translation, node: Node) -> Value:
    name = TORCH_BINARIES[str(node.target).split(".")[1]]
    if node.kwargs.get("rounding_mode") or t.argument(node, 2, "alpha", 1) != 1:
        raise UnsupportedError(f"{node.target} with alpha or rounding")
    shape = t.shape(node)
    sides: list[Value | torch.Tensor] = []
    for given in node.args[:2]:
        side = t.held.get(given) if isinstance(given, Node) else None
        if side is None:
            if not isinstance(given, int | float):
                raise UnsupportedError(f"{node.target} of a size")
            side = torch.tensor(given, dtype=t.dtype)
        sides.append(side)
    a, b = sides
    if isinstance(a, Value):
        return binary(t, name, a, b, shape)
    assert isinstance(b, Value)
    return binary(t, REVERSED.get(name, name), b, a, shape)


@rule("softmax", "_softmax")
def _softmax(t: Translation, node: Node) -> Value:
    value = row_major(t.built, t.value(node, 0))
    axis = t.axis(node, t.argument(node, 1, "dim"))
    order = [*(d for d in range(len(value.shape)) if d != axis), axis]
    back = [order.index(d) for d in range(len(order))]
    return permute(t.built, softmax(t, permute(t.built, value, order)), back)


def softmax(t: Translation, value: Value) -> Value:
    """Append the softmax of the last dimension of a row-major value."""
    k = value.shape[-1]
    slot = t.built.add(SOFTMAX, 0, value.slot, value.elements, [value.elements // k, k, 0.0])
    return Value(slot, value.shape)


@rule("mean", "sum", "amax", "amin")
def _reduce(t: Translation, node: Node) -> Value:
    name = {"amax": "max", "amin": "min"}.get(n := str(node.target).split(".")[1], n)
    dims = t.argument(node, 1, "dim")
    if dims is None or dims == []:
        raise UnsupportedError(f"{node.target} over the batch")
    axes = sorted({t.axis(node, d) for d in ([dims] if isinstance(dims, int) else dims)})
    value = row_major(t.built, t.value(node, 0))
    moved = permute(t.built, value, [*(d for d in range(len(value.shape)) if d not in axes), *axes])
    k = math.prod(value.shape[d] for d in axes)
    rows = value.elements // k
    slot = t.built.add(REDUCE, REDUCTIONS.index(name), moved.slot, rows, [rows, k, 0.0])
    return Value(slot, t.shape(node))


def normalize(t: Translation, value: Value, rows: int, epsilon: float) -> Value:
    """Append the normalization of rows of a value to mean 0 and variance 1."""
    value = row_major(t.built, value)
    words: list[int | float] = [rows, value.elements // rows, float(epsilon)]
    slot = t.built.add(NORMALIZE, 0, value.slot, value.elements, words)
    return Value(slot, value.shape)
