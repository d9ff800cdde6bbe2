"""Functions that change the shape, or take a part of a tensor."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ..exchange import scattered
from ..split_tensor import NO_RULE, SplitTensor, named_functions, rule_for
from ..splits import Split

Shape = tuple[int, ...]


def moved_split(shape: Shape, split: Split, ranks: int, target: Shape) -> Split | None:
    """Return the division of a reshaped tensor; None if its pieces are no part of one dim.

    The elements of a tensor in order are [outer blocks, ranks, inner elements]. The target must
    have a dim in which these three lie.
    """
    outer = prod(shape[: split.dim]) * split.blocks
    inner = shape[split.dim] // (split.blocks * ranks) * prod(shape[split.dim + 1 :])
    before = 1
    for dim, extent in enumerate(target):
        after = prod(target[dim + 1 :])
        if extent > 1 and outer % before == 0 and inner % max(after, 1) == 0 and after:
            blocks = outer // before
            if extent % (blocks * ranks) == 0 and blocks * ranks * (inner // after) == extent:
                return Split(dim, blocks)
        before *= extent
    return None


def reshaped(x: SplitTensor, target: Sequence[int], copies: bool) -> Any:
    """Return a reshaped tensor; NO_RULE if its pieces are no part of one dim.

    Args:
        copies: Whether elements may be copied (reshape), and not only viewed.
    """
    wanted = list(target)
    if wanted.count(-1) == 1:
        known = prod(n for n in wanted if n != -1)
        if not known or x.numel() % known:
            return NO_RULE
        wanted[wanted.index(-1)] = x.numel() // known
    if prod(wanted) != x.numel():
        raise ValueError(f"shape {tuple(target)} is invalid for input of size {x.numel()}")
    split = moved_split(tuple(x.shape), x.division, x.axis.size, tuple(wanted))
    if split is None:
        return NO_RULE
    shape = split.local_shape(wanted, x.axis.size)
    local = x.local.reshape(shape) if copies else x.local.view(shape)
    return SplitTensor.of(local, split, x.axis)


def _sizes(values: Sequence[Any]) -> Any:
    """Return sizes that are given one by one or as a sequence; None for something else."""
    if len(values) == 1 and isinstance(values[0], (tuple, list, torch.Size)):
        values = tuple(values[0])
    return list(values) if values and all(isinstance(n, int) for n in values) else None


@rule_for(*named_functions("reshape", "view"))
def reshape(func: Any, args: Any, kwargs: Any) -> Any:
    """Reshape the pieces."""
    x, *sizes = args
    sizes = _sizes(sizes) or _sizes((kwargs.get("shape") or kwargs.get("size"),))
    if sizes is None or not isinstance(x, SplitTensor):
        return NO_RULE
    return reshaped(x, sizes, copies=func is not torch.Tensor.view)


@rule_for(*named_functions("view_as", "reshape_as"))
def reshape_as(func: Any, args: Any, kwargs: Any) -> Any:
    """Reshape the pieces like another tensor."""
    x, other = args[0], args[1] if len(args) > 1 else kwargs["other"]
    if not isinstance(x, SplitTensor):
        return NO_RULE
    return reshaped(x, tuple(other.shape), copies=func is not torch.Tensor.view_as)


@rule_for(*named_functions("flatten"))
def flatten(func: Any, args: Any, kwargs: Any) -> Any:
    """Join neighbouring dims."""
    given = dict(zip(("input", "start_dim", "end_dim"), args, strict=False)) | kwargs
    x, start, end = given["input"], given.get("start_dim", 0), given.get("end_dim", -1)
    if not isinstance(start, int) or not isinstance(end, int):
        return NO_RULE
    start, end = start % x.dim(), end % x.dim()
    shape = list(x.shape)
    return reshaped(x, [*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]], True)


@rule_for(*named_functions("unflatten"))
def unflatten(func: Any, args: Any, kwargs: Any) -> Any:
    """Divide a dim into several."""
    x, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
    sizes = _sizes(args[2:]) or _sizes((kwargs.get("sizes"),))
    if sizes is None or not isinstance(dim, int):
        return NO_RULE
    dim, shape = dim % x.dim(), list(x.shape)
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = shape[dim] // prod(n for n in sizes if n != -1)
    return reshaped(x, [*shape[:dim], *sizes, *shape[dim + 1 :]], False)


@rule_for(*named_functions("unsqueeze", "squeeze"))
def squeeze(func: Any, args: Any, kwargs: Any) -> Any:
    """Add or remove dims of extent 1."""
    x, dims = args[0], [*args[1:], *kwargs.values()]
    if func in (torch.unsqueeze, torch.Tensor.unsqueeze):
        if len(dims) != 1:
            return NO_RULE
        at = dims[0] % (x.dim() + 1)
        split = x.division.at(x.division.dim + (at <= x.division.dim))
        return SplitTensor.of(x.local.unsqueeze(at), split, x.axis)
    given = [*range(x.dim())] if not dims else dims[0] if isinstance(dims[0], tuple) else dims
    chosen = {dim % x.dim() for dim in given}
    gone = sorted(dim for dim in chosen if x.shape[dim] == 1)
    split = x.division.at(x.division.dim - sum(dim < x.division.dim for dim in gone))
    return SplitTensor.of(x.local.squeeze(tuple(gone)), split, x.axis)


def _permuted(x: SplitTensor, order: Sequence[int]) -> SplitTensor:
    order = [dim % x.dim() for dim in order]
    split = x.division.at(order.index(x.division.dim))
    return SplitTensor.of(x.local.permute(order), split, x.axis)


@rule_for(*named_functions("permute"))
def permute(func: Any, args: Any, kwargs: Any) -> Any:
    """Reorder dims."""
    order = _sizes(args[1:]) or _sizes((kwargs.get("dims"),))
    return NO_RULE if order is None else _permuted(args[0], order)


@rule_for(
    *named_functions("transpose", "swapaxes", "swapdims", "t", "adjoint"),
    *(getattr(torch.Tensor, name).__get__ for name in ("T", "mT")),
)
def transpose(func: Any, args: Any, kwargs: Any) -> Any:
    """Exchange two dims."""
    x = args[0]
    pair = [*args[1:], *kwargs.values()]
    if not pair:
        name = getattr(func, "__name__", "")
        if x.dim() != 2 and name != "adjoint" and func is not torch.Tensor.mT.__get__:  # type: ignore[attr-defined]
            return NO_RULE
        pair = [-2, -1]
    if len(pair) != 2 or x.is_complex():
        return NO_RULE
    order = list(range(x.dim()))
    a, b = (dim % x.dim() for dim in pair)
    order[a], order[b] = b, a
    return _permuted(x, order)


@rule_for(*named_functions("movedim", "moveaxis"))
def movedim(func: Any, args: Any, kwargs: Any) -> Any:
    """Move dims."""
    x, *others = args
    places = torch.empty(tuple(range(2, x.dim() + 2)), device="meta")  # each extent names its dim
    moved = torch.movedim(places, *others, **kwargs)
    return _permuted(x, [extent - 2 for extent in moved.shape])


@rule_for(*named_functions("expand", "expand_as", "broadcast_to"))
def expand(func: Any, args: Any, kwargs: Any) -> Any:
    """Repeat dims of extent 1 without a copy."""
    x, *sizes = args
    if not isinstance(x, SplitTensor):
        return NO_RULE
    is_like = len(sizes) == 1 and isinstance(sizes[0], torch.Tensor)
    wanted = list(sizes[0].shape) if is_like else _sizes(sizes)
    if wanted is None:
        return NO_RULE
    split = x.division.at(x.division.dim + len(wanted) - x.dim())
    wanted[split.dim] = x.local.shape[x.division.dim]
    return SplitTensor.of(x.local.expand(wanted), split, x.axis)


# parts


@rule_for(*named_functions("chunk", "split", "tensor_split"))
def divide(func: Any, args: Any, kwargs: Any) -> Any:
    """Divide a dim into parts: another dim, or the blocks of the divided one."""
    options = [value for name, value in kwargs.items() if name != "dim"]
    x, how = args[0], args[1] if len(args) > 1 else options[0]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % x.dim()
    if dim != x.division.dim:
        found = func(x.local, how, dim)
        return type(found)(SplitTensor.of(one, x.division, x.axis) for one in found)
    extent, blocks = x.shape[dim], x.division.blocks
    if isinstance(how, (list, tuple)):
        if len(set(how)) != 1 or sum(how) != extent:
            return NO_RULE
        how = how[0]
    elif not isinstance(how, int):
        return NO_RULE
    elif "split" not in func.__name__ or func.__name__ == "tensor_split":
        if extent % how:
            return NO_RULE
        how = extent // how
    parts = extent // how
    if extent % how or blocks % parts:
        return NO_RULE
    local = x.local.split(x.local.shape[dim] // parts, dim)
    split = Split(dim, blocks // parts)
    return tuple(SplitTensor.of(one, split, x.axis) for one in local)


@rule_for(*named_functions("unbind", "select"), torch.Tensor.__iter__)
def unbind(func: Any, args: Any, kwargs: Any) -> Any:
    """Take the parts of another dim."""
    x, *others = args
    is_select = func in (torch.select, torch.Tensor.select)
    dim = (others[0] if others else kwargs.get("dim", 0)) % x.dim()
    if dim == x.division.dim:
        return NO_RULE
    split = x.division.at(x.division.dim - (dim < x.division.dim))
    if is_select:
        index = others[1] if len(others) > 1 else kwargs["index"]
        return SplitTensor.of(x.local.select(dim, index), split, x.axis)
    found = tuple(SplitTensor.of(one, split, x.axis) for one in x.local.unbind(dim))
    return iter(found) if func is torch.Tensor.__iter__ else found


@rule_for(*named_functions("narrow"))
def narrow(func: Any, args: Any, kwargs: Any) -> Any:
    """Take a range of another dim."""
    x = args[0]
    given = dict(zip(("dim", "start", "length"), args[1:], strict=False)) | kwargs
    if not isinstance(x, SplitTensor) or given["dim"] % x.dim() == x.division.dim:
        return NO_RULE
    return SplitTensor.of(x.local.narrow(**given), x.division, x.axis)


@rule_for(torch.Tensor.__getitem__)
def index(func: Any, args: Any, kwargs: Any) -> Any:
    """Index with numbers and slices that leave the divided dim whole."""
    x, indices = args
    if not isinstance(x, SplitTensor):
        return NO_RULE
    given = indices if isinstance(indices, tuple) else (indices,)
    plain = all(
        one is None or one is Ellipsis or isinstance(one, slice) or type(one) is int
        for one in given
    )
    if not plain:
        return NO_RULE
    used = sum(one is not None and one is not Ellipsis for one in given)
    at, target = 0, None  # dims of the tensor, and of the result
    result = 0
    full = [one for one in given if one is Ellipsis]
    items = given if full else (*given, Ellipsis)
    for one in items:
        count = x.dim() - used if one is Ellipsis else 0 if one is None else 1
        if at <= x.division.dim < at + count:
            if one is Ellipsis:
                target = result + x.division.dim - at
            elif isinstance(one, slice) and one.indices(x.shape[at]) == (0, x.shape[at], 1):
                target = result
            else:
                return NO_RULE
        at += count
        result += count if one is Ellipsis else type(one) is not int
    if target is None:
        return NO_RULE
    local = tuple(slice(None) if isinstance(one, slice) and _is_all(one) else one for one in given)
    local = _localized(local, x)
    return SplitTensor.of(x.local[local], x.division.at(target), x.axis)


def _is_all(one: slice) -> bool:
    return one == slice(None)


def _localized(given: tuple[Any, ...], x: SplitTensor) -> tuple[Any, ...]:
    """Return the index with an explicit whole range of the divided dim as ``:``."""
    used = sum(one is not None and one is not Ellipsis for one in given)
    at, found = 0, []
    for one in given:
        count = x.dim() - used if one is Ellipsis else 0 if one is None else 1
        is_divided = at <= x.division.dim < at + count and isinstance(one, slice)
        found.append(slice(None) if is_divided else one)
        at += count
    return tuple(found)


@rule_for(*named_functions("cat", "concat", "concatenate", "stack"))
def join(func: Any, args: Any, kwargs: Any) -> Any:
    """Join tensors along another dim, or divided alike along the divided one."""
    given = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
    if given.keys() - {"tensors", "dim"}:
        return NO_RULE
    tensors = list(given["tensors"])
    first = next(one for one in tensors if isinstance(one, SplitTensor))
    split, axis = first.division, first.axis
    is_stack = func is torch.stack
    dim = given.get("dim", 0) % (first.dim() + is_stack)
    if any(one.dim() != first.dim() for one in tensors):
        return NO_RULE
    if dim == split.dim and not is_stack:
        is_alike = all(isinstance(t, SplitTensor) and t.division.dim == dim for t in tensors)
        inner = {t.local.shape[dim] // t.division.blocks for t in tensors if is_alike}
        if len(inner) != 1:
            return NO_RULE
        found = torch.cat([t.local for t in tensors], dim)
        return SplitTensor.of(found, Split(dim, sum(t.division.blocks for t in tensors)), axis)
    pieces = []
    for one in tensors:
        if isinstance(one, SplitTensor):
            pieces.append(
                one.local if one.division == split else scattered(one.whole(), split, axis)
            )
        else:
            pieces.append(scattered(one, split, axis))
    moved = split.at(split.dim + (is_stack and dim <= split.dim))
    return SplitTensor.of(func(pieces, dim), moved, axis)
