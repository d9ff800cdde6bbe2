"""Functions of each element, with broadcasting."""

from typing import Any

import torch

from ..exchange import TensorAxis
from ..split_tensor import NO_RULE, SplitTensor, memory_order, named_functions, rule_for
from ..splits import Split
from .alignment import piece_at, wrap

_UNARY = (
    *("abs", "absolute", "acos", "acosh", "angle", "arccos", "arctan", "asin", "asinh", "atan"),
    *("atanh", "ceil", "clone", "conj", "cos", "cosh", "deg2rad", "detach", "digamma", "erf"),
    *("erfc", "erfinv", "exp", "exp2", "expm1", "fix", "floor", "frac", "isfinite", "isinf"),
    *("isnan", "isneginf", "isposinf", "lgamma", "log", "log10", "log1p", "log2", "logical_not"),
    *("logit", "bitwise_not", "nan_to_num", "neg", "negative", "positive", "rad2deg"),
    *("reciprocal", "relu", "round", "rsqrt", "sgn", "sigmoid", "sign", "signbit", "sin", "sinc"),
    *("sinh", "sqrt", "square", "tan", "tanh", "trunc", "float", "double", "half"),
    *("bfloat16", "int", "long", "bool", "zeros_like", "ones_like", "empty_like", "full_like"),
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
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "mod"),
    *("rfloordiv", "rmod", "pow", "rpow", "neg", "pos", "abs", "invert", "eq", "ne", "lt", "le"),
    *("gt", "ge", "and", "rand", "or", "ror", "xor", "rxor"),
)
_IN_PLACE_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")


def _operators() -> list[Any]:
    names = [f"__{name}__" for name in _OPERATORS]
    names += [f"__i{name}__" for name in _IN_PLACE_OPERATORS]
    return [getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name)]


_NAMES = (*_UNARY, *_SEVERAL, "fill", "zero")


@rule_for(
    *named_functions(*_NAMES, *(f"{name}_" for name in _NAMES)),
    *_operators(),
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]
    torch.Tensor.real.__get__,  # type: ignore[attr-defined]
)
def pointwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute each element where its piece is."""
    if "out" in kwargs or any(isinstance(one, (list, tuple)) for one in args):
        return NO_RULE
    if func is torch.where and len(args) + len(kwargs) == 1:  # indices of elements
        return NO_RULE
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
    target = max((t for t in tensors if isinstance(t, SplitTensor)), key=lambda t: t.numel())
    name = getattr(func, "__name__", "")
    in_place = name.startswith("__i") and name != "__invert__"
    in_place = in_place or (name.endswith("_") and not name.endswith("__"))
    in_place = in_place or kwargs.get("inplace") is True
    if in_place:
        if not isinstance(args[0], SplitTensor):
            return NO_RULE  # a whole tensor changes
        target = args[0]
    where, split, axis = target.division.dim - target.dim(), target.division, target.axis
    dims = max(one.dim() for one in tensors)
    if in_place and dims > target.dim():
        return NO_RULE
    change = _Pieces(where, target.shape[target.division.dim], split, axis)
    found = func(*map(change, args), **{key: change(one) for key, one in kwargs.items()})
    if in_place and found is target.local:
        return target
    return wrap(found, split.at(dims + where), axis)


@rule_for(*named_functions("contiguous"))
def contiguous(func: Any, args: Any, kwargs: Any) -> Any:
    """Give the piece the order of memory that the whole tensor gets.

    A piece of extent 1 counts as contiguous in several orders, and would keep its own one.
    """
    x, order = args[0], kwargs.get("memory_format", torch.contiguous_format)
    found = x.local.contiguous(memory_format=order)
    whole = torch.empty(x.shape, device="meta", memory_format=order)
    if memory_order(found) != memory_order(whole):
        found = found.clone(memory_format=order)
    return SplitTensor.of(found, x.division, x.axis)


class _Pieces:
    def __init__(self, where: int, extent: int, split: Split, axis: TensorAxis) -> None:
        self.where, self.extent, self.split, self.axis = where, extent, split, axis

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        dim = value.dim() + self.where
        meets = dim >= 0 and value.shape[dim] == self.extent
        return piece_at(value, dim if meets else None, self.split, self.axis)


@rule_for(*named_functions("to", "type", "type_as", "cuda", "cpu"))
def cast(func: Any, args: Any, kwargs: Any) -> Any:
    """Convert the pieces; a second tensor gives only its dtype and device."""
    if not isinstance(args[0], SplitTensor):
        return func(args[0], args[1].local, *args[2:], **kwargs)
    own, *others = args
    plain = [one.local if isinstance(one, SplitTensor) else one for one in others]
    found = func(own.local, *plain, **kwargs)
    return wrap(found, own.division, own.axis)


@rule_for(*named_functions("dropout", "alpha_dropout", "feature_dropout", "dropout_"))
def dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """Drop the elements that one process would drop: the mask of the whole tensor, cut.

    All ranks of the axis draw the same numbers, so their generators stay equal.
    """
    if func not in (torch.nn.functional.dropout, torch.dropout):
        return NO_RULE
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    x, p = given["input"], given.get("p", 0.5)
    training = given.get("training", given.get("train", True))
    if not training or p == 0.0:
        return x
    dropped = _masked(x, x.shape, x.division, p)
    if not given.get("inplace"):
        return dropped
    x.local.copy_(dropped.local)
    return x


@rule_for(*named_functions("dropout1d", "dropout2d", "dropout3d"))
def channel_dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """Drop the channels that one process would drop."""
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    x, p, spatial = given["input"], given.get("p", 0.5), int(func.__name__[-2])
    if given.get("inplace") or x.dim() != spatial + 2 or x.division.dim > 1:
        return NO_RULE
    if not given.get("training", True) or p == 0.0:
        return x
    return _masked(x, (*x.shape[:2], *(1,) * spatial), x.division, p)


def _masked(x: SplitTensor, shape: Any, split: Split, p: float) -> SplitTensor:
    if p == 1.0:
        return SplitTensor.of(x.local * 0.0, split, x.axis)
    if len(shape) == x.dim() and tuple(shape) == tuple(x.shape):
        # numbers are drawn in the order of memory
        order, like = memory_order(x.local), x.local
        noise = torch.empty_permuted(shape, order, dtype=like.dtype, device=like.device)
    else:
        noise = x.local.new_empty(shape)
    noise.bernoulli_(1 - p).div_(1 - p)
    kept = split.cut(noise, x.axis.rank, x.axis.size)
    return SplitTensor.of(x.local * kept, split, x.axis)
