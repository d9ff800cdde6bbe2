"""Rules for functions along other dims than the divided ones: views, reductions, scans."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from .divided_tensor import (
    NO_RULE,
    DividedTensor,
    Rules,
    divided_tensors,
    getters,
    named_functions,
)

T = torch.Tensor


def register_views(rules: Rules) -> None:
    """Register the rules of this module."""
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
    if any(isinstance(one, torch.Tensor) for one in given):
        return NO_RULE
    if func in _SQUEEZES and any(x.size(dim) == 1 for dim in x.divided_dims):
        return NO_RULE
    numbers = [abs(int(one)) for one in given if hasattr(one, "__index__")]
    first = 1 + max([*x.shape, *numbers], default=0)
    marks = {dim: first + i for i, dim in enumerate(x.divided_dims)}
    shape = [marks.get(dim, extent) for dim, extent in enumerate(x.shape)]
    try:
        with torch.no_grad():
            shown = func(torch.empty(shape, dtype=x.dtype, device="meta"), *args, **kwargs)
    except RuntimeError:  # sizes that do not fit the extents
        return NO_RULE
    results, nest = tree_flatten(shown)
    places = [_places_of(marks, one) for one in results]
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
    if any(isinstance(one, torch.Tensor) for one in (*args, *kwargs.values())):  # of ``diff``
        return NO_RULE
    if any(dim % x.dim() in x.divided_dims for dim in dims):
        return NO_RULE
    results, nest = tree_flatten(func(x.local, *args, **kwargs))
    same = {dim: dim for dim in x.divided_dims}
    return tree_unflatten([x.placed(result, same) for result in results], nest)


def reshaped(func: Any, x: DividedTensor, *args: Any, **kwargs: Any) -> Any:
    """Change the shape."""
    given = [tuple(one.shape) if isinstance(one, torch.Tensor) else one for one in args]
    other = kwargs.get("other")
    if isinstance(other, torch.Tensor):
        given, kwargs = [tuple(other.shape)], {}
    if any(isinstance(one, torch.dtype) for one in (*given, *kwargs.values())):
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
    if kwargs or any(one.dim() != first.dim() for one in tensors):
        return NO_RULE
    dim %= first.dim() + is_stack
    rests = {(*one.shape[:dim], *one.shape[dim + (not is_stack) :]) for one in tensors}
    if len(rests) > 1:
        func([torch.empty(one.shape, device="meta") for one in tensors], dim)  # PyTorch's error
    if not is_stack and any(dim in one.divided_dims for one in divided_tensors(tensors)):
        return NO_RULE
    division = first.division_of(list(tensors), first.shape)
    parts = []
    for tensor in tensors:
        shape = list(first.shape)
        if not is_stack:
            shape[dim] = tensor.size(dim)
        parts.append(first.aligned(tensor, torch.Size(shape), division))
    like = first.divided_like(parts[0], division)
    dims = {one: one + (is_stack and dim <= one) for one in like.divided_dims}
    return like.placed(func(parts, dim), dims)


def item(func: Any, x: DividedTensor, index: Any) -> Any:
    """Index with numbers and slices; those of divided dims take everything."""
    items = index_items(x, index)
    if any(isinstance(one, (torch.Tensor, list, bool)) for one in items):
        return NO_RULE
    dim = 0
    for place, one in enumerate(items):
        if one is None:
            continue
        extent = x.size(dim)
        if isinstance(one, slice) and one.indices(extent) == (0, extent, 1):
            items[place] = slice(None)
        dim += 1
    return untouched(func, x, tuple(items))


def assigned(func: Any, x: DividedTensor, index: Any, value: Any) -> Any:
    """Assign to an index with numbers and slices; those of divided dims take everything."""
    found = item(T.__getitem__, x, index)
    if found is NO_RULE:
        return NO_RULE
    found.copy_(value) if isinstance(value, torch.Tensor) else found.fill_(value)
    return None


def index_items(x: torch.Tensor, index: Any) -> list[Any]:
    """Return an index of all dims: "..." and what is missing at the end as slices."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(one is not None and one is not Ellipsis for one in items)
    place = next((i for i, one in enumerate(items) if one is Ellipsis), len(items))
    items[place : place + 1] = [slice(None)] * (x.dim() - used)
    return items


def iterated(func: Any, x: DividedTensor) -> Any:
    """Iterate over the first dim."""
    found = untouched(torch.unbind, x)
    return found if found is NO_RULE else iter(found)
