"""Rules for functions of each element, with broadcasting."""

from typing import Any

import torch

from .divided_tensor import (
    NO_RULE,
    DividedTensor,
    Rules,
    function_name,
    getters,
    is_in_place,
    named_functions,
)

_UNARY = (
    *("abs", "absolute", "acos", "acosh", "angle", "arccos", "arctan", "asin", "asinh", "atan"),
    *("atanh", "ceil", "clone", "conj", "conj_physical", "contiguous", "cos", "cosh", "deg2rad"),
    *("detach", "digamma", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "fix", "floor", "frac"),
    *("isfinite", "isinf", "isnan", "isneginf", "isposinf", "lgamma", "log", "log10", "log1p"),
    *("log2", "logical_not", "logit", "bitwise_not", "nan_to_num", "neg", "negative", "positive"),
    *("rad2deg", "reciprocal", "relu", "resolve_conj", "round", "rsqrt", "sgn", "sigmoid", "sign"),
    *("signbit", "sin", "sinc", "sinh", "sqrt", "square", "tan", "tanh", "trunc"),
    *("float", "double", "half", "bfloat16", "int", "long", "bool", "real", "imag"),
    *("zeros_like", "ones_like", "empty_like", "full_like"),
    *("celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu"),
    *("logsigmoid", "mish", "relu6", "selu", "silu", "softplus", "softshrink", "softsign"),
    *("tanhshrink", "threshold", "clamp", "clip", "clamp_min", "clamp_max"),
)
_SEVERAL = (
    *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "rsub", "pow"),
    *("floor_divide", "remainder", "fmod", "float_power", "maximum", "minimum", "fmax", "fmin"),
    *("atan2", "arctan2", "hypot", "logaddexp", "logaddexp2", "copysign", "xlogy", "heaviside"),
    *("eq", "ne", "lt", "le", "gt", "ge", "not_equal", "less", "less_equal", "greater"),
    *("greater_equal", "isclose", "logical_and", "logical_or", "logical_xor", "bitwise_and"),
    *("bitwise_or", "bitwise_xor", "lerp", "addcmul", "addcdiv", "where", "masked_fill", "copy"),
)
_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "div", "rdiv"),
    *("floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "neg", "pos", "abs", "invert"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "rand", "or", "ror", "xor", "rxor"),
)
_IN_PLACE_OPERATORS = (
    *("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and", "or", "xor"),
)


def register_elementwise(rules: Rules) -> None:
    """Register the rules of this module."""
    names = (*_UNARY, *_SEVERAL, "fill", "zero")
    operators = [f"__{name}__" for name in _OPERATORS]
    operators += [f"__i{name}__" for name in _IN_PLACE_OPERATORS]
    rules.add(
        *named_functions(*names, *(f"{name}_" for name in names)),
        *(getattr(torch.Tensor, name) for name in operators if hasattr(torch.Tensor, name)),
        *getters("data", "real", "imag"),
        anywhere=True,
    )(pointwise)
    rules.add(*named_functions("to", "type", "type_as", "cuda", "cpu"), anywhere=True)(cast)


def pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute each element from the same element of all operands, which broadcast."""
    if "out" in kwargs or any(isinstance(one, (list, tuple)) for one in args):
        return NO_RULE
    if func is torch.where and len(args) + len(kwargs) == 1:  # indices of elements
        return NO_RULE
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
    divided = [tensor for tensor in tensors if isinstance(tensor, DividedTensor)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    first = max(divided, key=lambda one: one.numel())
    if is_in_place(func, kwargs):
        if not isinstance(args[0], DividedTensor) or shape != args[0].shape:
            return NO_RULE
        first = args[0]
    division = first.division_of([first, *tensors], shape)
    given = [first.aligned(one, shape, division) for one in args]
    named = {key: first.aligned(one, shape, division) for key, one in kwargs.items()}
    found = func(*given, **named)
    for before, after in zip((*args, *kwargs.values()), (*given, *named.values()), strict=True):
        if found is after and isinstance(before, torch.Tensor):
            if not isinstance(before, DividedTensor) or after is not before.local:
                name = function_name(func)
                raise first.refusal(f"{name} (y = x * 2, not x *= 2) would change a copy of")
            return before
    return first.divided_like(found, division)


def cast(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Convert the parts; a second tensor gives only its dtype and device."""
    given = [one.local if isinstance(one, DividedTensor) else one for one in args]
    named = {k: one.local if isinstance(one, DividedTensor) else one for k, one in kwargs.items()}
    if not isinstance(x, DividedTensor):
        return func(x, *given, **named)
    found = func(x.local, *given, **named)
    if not isinstance(found, torch.Tensor):  # of Tensor.type()
        return found
    return x if found is x.local else x.placed(found, {dim: dim for dim in x.divided_dims})
