"""Rules for functions of torch with divided tensors, for all layouts.

Functions along other dims than the divided ones (views, reductions, scans); functions of each
element, with broadcasting; products of matrices and ``einsum``: sums over dims that operands share,
which have labels; attention of ``torch.nn.MultiheadAttention`` from functions that have rules.
"""

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from numbers import Integral
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - PyTorch's name
from torch.utils._pytree import tree_flatten, tree_unflatten

from .divided_tensor import (
    NO_RULE,
    DividedTensor,
    Rules,
    divided_tensors,
    function_name,
    getters,
    is_in_place,
    named_functions,
)

T = torch.Tensor


def register_rules(rules: Rules) -> None:
    """Register the rules of this module but those of products, for which a layout has a function.

    ``register_products`` registers these.
    """
    rules.add(
        *named_functions("permute", "transpose", "swapaxes", "swapdims", "t", "adjoint"),
        *named_functions("movedim", "moveaxis", "unsqueeze", "squeeze", "chunk", "split"),
        *named_functions("tensor_split", "unbind", "select", "narrow", *REDUCTIONS),
        *getters("T", "mT", "H", "mH"),
    )(untouched)
    rules.add(*named_functions(*DIM_ARGUMENTS))(along)
    rules.add(*named_functions("reshape", "view", "flatten", "unflatten", "view_as", "reshape_as"))(
        reshaped
    )
    rules.add(*named_functions("expand", "expand_as", "broadcast_to", "repeat"))(expanded)
    rules.add(*named_functions("cat", "concat", "concatenate", "stack"), anywhere=True)(joined)
    rules.add(T.__getitem__)(item)
    rules.add(T.__setitem__)(assigned)
    rules.add(T.__iter__)(iterated)
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


REDUCTIONS = (
    *("sum", "mean", "amax", "amin", "nansum", "all", "any", "logsumexp", "prod", "var", "std"),
    *("norm", "max", "min", "argmax", "argmin", "median", "topk", "var_mean", "std_mean"),
)


def untouched(func: Any, x: DividedTensor, *args: Any, **kwargs: Any) -> Any:
    """Compute a view or a reduction of other dims than the divided ones.

    A tensor without memory, whose divided dims have extents that no other dim has, shows which dims
    of the results they are. It must not be used for functions that mix elements along a dim and
    keep its extent.
    """
    given = tree_flatten((args, kwargs))[0]
    if any(isinstance(arg, torch.Tensor) for arg in given):
        return NO_RULE
    if func in _SQUEEZES and any(x.size(dim) == 1 for dim in x.divided_dims):
        return NO_RULE
    numbers = [abs(int(arg)) for arg in given if hasattr(arg, "__index__")]
    first = 1 + max([*x.shape, *numbers], default=0)
    marks = {dim: first + i for i, dim in enumerate(x.divided_dims)}
    shape = [marks.get(dim, extent) for dim, extent in enumerate(x.shape)]
    try:
        with torch.no_grad():
            shown = func(torch.empty(shape, dtype=x.dtype, device="meta"), *args, **kwargs)
    except RuntimeError:  # sizes that do not fit the extents
        return NO_RULE
    results, nest = tree_flatten(shown)
    places = [_places_of(marks, t) for t in results]
    if None in places:
        return NO_RULE
    parts = tree_flatten(func(x.local, *args, **kwargs))[0]
    found = []
    for part, result, dims in zip(parts, results, places, strict=True):
        assert dims is not None
        extents = list(result.shape)
        for dim, place in dims.items():
            extents[place] = x.local.size(dim)
        # ``squeeze`` removes a divided dim of which a rank has one row
        found.append(x.placed(part if part.shape == tuple(extents) else part.view(extents), dims))
    return tree_unflatten(found, nest)


_SQUEEZES = named_functions("squeeze")


def _places_of(marks: dict[int, int], result: Any) -> dict[int, int] | None:
    """Return the dim of a result that each divided dim has become; None without it."""
    if not isinstance(result, torch.Tensor):
        return None
    shape = list(result.shape)
    if any(shape.count(mark) != 1 for mark in marks.values()):
        return None
    return {dim: shape.index(mark) for dim, mark in marks.items()}


# of functions that mix elements along one dim: the place of the argument, and its default
DIM_ARGUMENTS: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod"), (0, None)),
    **dict.fromkeys(("logcumsumexp", "cummax", "cummin", "flip"), (0, None)),
    **dict.fromkeys(("sort", "argsort", "glu"), (0, -1)),
    "roll": (1, None),
    "normalize": (1, 1),
    "diff": (1, -1),
}


def along(func: Any, x: DividedTensor, *args: Any, **kwargs: Any) -> Any:
    """Compute along dims that are not divided."""
    place, default = DIM_ARGUMENTS[func.__name__]
    dims = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else default))
    if func.__name__ == "flip" and isinstance(dims, int):
        dims = args
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = (dims,)
    if not isinstance(dims, (tuple, list)) or not dims:
        return NO_RULE
    if any(isinstance(arg, torch.Tensor) for arg in (*args, *kwargs.values())):  # of ``diff``
        return NO_RULE
    if any(dim % x.dim() in x.divided_dims for dim in dims):
        return NO_RULE
    results, nest = tree_flatten(func(x.local, *args, **kwargs))
    same = {dim: dim for dim in x.divided_dims}
    return tree_unflatten([x.placed(result, same) for result in results], nest)


def reshaped(func: Any, x: DividedTensor, *args: Any, **kwargs: Any) -> Any:
    """Change the shape."""
    given = [tuple(arg.shape) if isinstance(arg, torch.Tensor) else arg for arg in args]
    other = kwargs.get("other")
    if isinstance(other, torch.Tensor):
        given, kwargs = [tuple(other.shape)], {}
    if any(isinstance(arg, torch.dtype) for arg in (*given, *kwargs.values())):
        return NO_RULE
    is_view = func in (T.view, T.view_as)
    named = {T.view_as: T.view, T.reshape_as: T.reshape}.get(func, func)
    shape = named(torch.empty(x.shape, device="meta"), *given, **kwargs).shape
    return x.in_shape(tuple(shape), is_view)


def expanded(func: Any, x: DividedTensor, *args: Any, **kwargs: Any) -> Any:
    """Repeat other dims."""
    sizes = (*args, *kwargs.values())
    if isinstance(sizes[0], torch.Tensor):
        sizes = (tuple(sizes[0].shape),)
    wanted = list(sizes[0]) if isinstance(sizes[0], (tuple, list)) else list(sizes)
    repeats = func is T.repeat
    dims = {dim: dim + len(wanted) - x.dim() for dim in x.divided_dims}
    for dim, place in dims.items():
        if place < 0 or wanted[place] not in ((1,) if repeats else (-1, x.size(dim))):
            return NO_RULE
        wanted[place] = 1 if repeats else -1
    return x.placed(x.local.repeat(wanted) if repeats else x.local.expand(wanted), dims)


def joined(func: Any, tensors: Sequence[Any], dim: int = 0, **kwargs: Any) -> Any:
    """Concatenate or stack along a dim that is not divided."""
    first = next(divided_tensors(tensors))
    is_stack = func is torch.stack
    if kwargs or any(t.dim() != first.dim() for t in tensors):
        return NO_RULE
    dim %= first.dim() + is_stack
    rests = {(*t.shape[:dim], *t.shape[dim + (not is_stack) :]) for t in tensors}
    if len(rests) > 1:
        func([torch.empty(t.shape, device="meta") for t in tensors], dim)  # PyTorch's error
    if not is_stack and any(dim in t.divided_dims for t in divided_tensors(tensors)):
        return NO_RULE
    division = first.division_of(list(tensors), first.shape)
    parts = []
    for tensor in tensors:
        shape = list(first.shape)
        if not is_stack:
            shape[dim] = tensor.size(dim)
        parts.append(first.aligned(tensor, torch.Size(shape), division))
    like = first.divided_like(parts[0], division)
    dims = {d: d + (is_stack and dim <= d) for d in like.divided_dims}
    return like.placed(func(parts, dim), dims)


def item(func: Any, x: DividedTensor, index: Any) -> Any:
    """Index with numbers and slices; those of divided dims take everything."""
    items = index_items(x, index)
    if any(isinstance(key, (torch.Tensor, list, bool)) for key in items):
        return NO_RULE
    dim = 0
    for place, key in enumerate(items):
        if key is None:
            continue
        extent = x.size(dim)
        if isinstance(key, slice) and key.indices(extent) == (0, extent, 1):
            items[place] = slice(None)
        dim += 1
    return untouched(func, x, tuple(items))


def assigned(func: Any, x: DividedTensor, index: Any, value: Any) -> Any:
    """Assign to an index with numbers and slices; those of divided dims take everything."""
    # of other indices, such as a tuple of positions, ``item`` returns a copy
    if any(not isinstance(key, (slice, Integral, type(None))) for key in index_items(x, index)):
        return NO_RULE
    found = item(T.__getitem__, x, index)
    if found is NO_RULE:
        return NO_RULE
    found.copy_(value) if isinstance(value, torch.Tensor) else found.fill_(value)
    return None


def index_items(x: torch.Tensor, index: Any) -> list[Any]:
    """Return an index of all dims: "..." and what is missing at the end as slices."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(key is not None and key is not Ellipsis for key in items)
    place = next((i for i, key in enumerate(items) if key is Ellipsis), len(items))
    items[place : place + 1] = [slice(None)] * (x.dim() - used)
    return items


def iterated(func: Any, x: DividedTensor) -> Any:
    """Iterate over the first dim."""
    found = untouched(torch.unbind, x)
    return found if found is NO_RULE else iter(found)


# functions of each element


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


def pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute each element from the same element of all operands, which broadcast."""
    if "out" in kwargs or any(isinstance(arg, (list, tuple)) for arg in args):
        return NO_RULE
    if func is torch.where and len(args) + len(kwargs) == 1:  # indices of elements
        return NO_RULE
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
    divided = [tensor for tensor in tensors if isinstance(tensor, DividedTensor)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    first = max(divided, key=lambda t: t.numel())
    if is_in_place(func, kwargs):
        if not isinstance(args[0], DividedTensor) or shape != args[0].shape:
            return NO_RULE
        first = args[0]
    division = first.division_of([first, *tensors], shape)
    given = [first.aligned(arg, shape, division) for arg in args]
    named = {key: first.aligned(arg, shape, division) for key, arg in kwargs.items()}
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
    given = [arg.local if isinstance(arg, DividedTensor) else arg for arg in args]
    named = {k: arg.local if isinstance(arg, DividedTensor) else arg for k, arg in kwargs.items()}
    if not isinstance(x, DividedTensor):
        return func(x, *given, **named)
    found = func(x.local, *given, **named)
    if not isinstance(found, torch.Tensor):  # of Tensor.type()
        return found
    return x if found is x.local else x.placed(found, {dim: dim for dim in x.divided_dims})


# products


Labels = Sequence[Hashable]
# computes with plain operands; called with a function of them, the operands, the labels of the dims
# of each, and those of the result
Contract = Callable[..., Any]


def register_products(rules: Rules, contract: Contract) -> None:
    """Register the rules of products of matrices and ``einsum``."""
    names = ("matmul", "bmm", "mm", "__matmul__", "__rmatmul__")
    rules.add(*named_functions(*names), anywhere=True)(functools.partial(_matmul, contract))
    rules.add(torch.einsum, anywhere=True)(functools.partial(_einsum, contract))


def _matmul(
    contract: Contract, func: Any, a: torch.Tensor, b: torch.Tensor | None = None, **options: Any
) -> Any:
    """Compute a product of (batches of) matrices."""
    if options or b is None:
        return NO_RULE
    if func is torch.Tensor.__rmatmul__:
        a, b = b, a
    meta = [torch.empty(side.shape, device="meta") for side in (a, b)]
    dims = torch.matmul(*meta).dim()  # PyTorch's own errors
    has_rows, has_columns = a.dim() > 1, b.dim() > 1
    ends = [("m", "k")[not has_rows :], ("k", "n")[: 1 + has_columns]]
    labels: list[Labels] = []
    for number, (side, end) in enumerate(zip((a, b), ends, strict=True)):
        batch = range(-side.dim(), -2)
        # a dim of extent 1 is broadcast
        labels.append((*(i if side.size(i) > 1 else ("one", number, i) for i in batch), *end))
    rest = [name for name, has in (("m", has_rows), ("n", has_columns)) if has]
    result = (*range(-(dims - len(rest)) - 2, -2), *rest)
    return contract(torch.matmul, (a, b), labels, result)


def _einsum(contract: Contract, func: Any, equation: Any, *operands: Any) -> Any:
    """Compute an einsum without "..."."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "." in equation:
        return NO_RULE
    given, arrow, result = equation.replace(" ", "").partition("->")
    labels = given.split(",")
    if any(len(set(own)) != len(own) for own in labels):
        return NO_RULE
    torch.einsum(equation, *(torch.empty(operand.shape, device="meta") for operand in operands))
    if not arrow:
        every = given.replace(",", "")
        result = "".join(sorted(label for label in set(every) if every.count(label) == 1))

    def compute(*pieces: torch.Tensor) -> torch.Tensor:
        return torch.einsum(f"{given}->{result}", *pieces)

    return contract(compute, operands, labels, result)


# attention


def multi_head_attention(
    projecting: AbstractContextManager[Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: torch.Tensor | None,
    in_proj_bias: torch.Tensor | None,
    bias_k: torch.Tensor | None,
    bias_v: torch.Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    training: bool = True,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: torch.Tensor | None = None,
    k_proj_weight: torch.Tensor | None = None,
    v_proj_weight: torch.Tensor | None = None,
    static_k: torch.Tensor | None = None,
    static_v: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """Compute ``F.multi_head_attention_forward``; NO_RULE for its unusual arguments.

    Args:
        projecting: Context of the last projection.
        query, key, value: [length, batch, features].
    """
    unusual = (bias_k, bias_v, static_k, static_v)
    if use_separate_proj_weight or add_zero_attn or any(arg is not None for arg in unusual):
        return NO_RULE
    if query.dim() != 3 or in_proj_weight is None:
        return NO_RULE
    if is_causal and attn_mask is None:  # PyTorch's own error
        return NO_RULE
    projected = _projected((query, key, value), in_proj_weight, in_proj_bias, num_heads)
    mask = None
    if not (is_causal and key_padding_mask is None and not need_weights):
        mask = _added_mask(attn_mask, key_padding_mask, query)
    p = dropout_p if training else 0.0
    weights = None
    if need_weights:
        out, weights = _with_weights(projected, mask, p)
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        causal = is_causal and mask is None
        q, k, v = projected
        out = F.scaled_dot_product_attention(q, k, v, mask, p, causal)
    out = out.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)
    with projecting:
        return F.linear(out, out_proj_weight, out_proj_bias), weights


def _projected(
    tensors: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None, heads: int
) -> list[Any]:
    """Return queries, keys and values as [batch, heads, length, size]."""
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    found = []
    for x, w, b in zip(tensors, weight.chunk(3), biases, strict=True):
        y = F.linear(x, w, b)  # [length, batch, heads * size]
        found.append(y.reshape(y.shape[0], y.shape[1], heads, -1).permute(1, 2, 0, 3))
    return found


def _added_mask(
    mask: torch.Tensor | None, padding: torch.Tensor | None, query: torch.Tensor
) -> torch.Tensor | None:
    """Return the mask as numbers that are added: [batch, heads, length, key's length] or less."""
    found = None
    if mask is not None:
        found = _as_added(mask, query.dtype)
        found = found.unflatten(0, (query.shape[1], -1)) if found.dim() == 3 else found
    if padding is not None:
        added = _as_added(padding, query.dtype)[:, None, None, :]
        found = added if found is None else found + added
    return found


def _as_added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def _with_weights(projected: list[Any], mask: Any, p: float) -> tuple[Any, Any]:
    query, key, value = projected
    weights = (query * math.sqrt(1.0 / query.shape[-1])) @ key.transpose(-2, -1)
    weights = (weights if mask is None else weights + mask).softmax(-1)
    weights = F.dropout(weights, p, p > 0.0)
    return weights @ value, weights
