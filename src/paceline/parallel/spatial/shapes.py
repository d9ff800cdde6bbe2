"""Functions that change a tensor's shape: dims that are divided stay, or the tensor is gathered."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - PyTorch's name

from ...cost.layout_memory import size_text
from .exchange import fetch, rows_of
from .layer_names import layer
from .partition import Partition
from .pointwise import aligned, functions, merged_parts
from .split_tensor import SplitTensor, first_split, handles, refused
from .windows import whole_shape

T = torch.Tensor


@handles(
    *functions("reshape flatten unflatten squeeze unsqueeze", torch, T),
    *(T.view, T.view_as, T.reshape_as),
)
def reshaped(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Give each divided dim its place in the new shape; gather where it is merged with others."""
    if func is T.view and args and isinstance(args[0], torch.dtype):
        raise refused("view(dtype) of a tensor", ".whole() first")
    if isinstance(args[0] if args else None, SplitTensor):
        args = (tuple(args[0].shape), *args[1:])
        func = T.reshape
    shape = whole_shape(func, values, *args, **options)
    places = _places(values.shape, shape, values.parts)
    if None in places.values():
        _say_gather(values, func)
        return func(values.whole(), *args, **options).as_subclass(GatheredView)
    parts = {place: values.parts[dim] for dim, place in places.items() if place is not None}
    wanted = list(shape)
    for dim, place in places.items():
        assert place is not None
        wanted[place] = values.local.size(dim)
    return values.like(values.local.reshape(wanted), parts)


class GatheredView(torch.Tensor):
    """What a view of a divided tensor has gathered: a copy, which must not be changed in place."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, SplitTensor) for kind in types):
            return NotImplemented
        name, options = getattr(func, "__name__", ""), kwargs or {}
        is_changing = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        if isinstance(args[0] if args else None, cls) and (
            (is_changing and name not in ("requires_grad_", "__index__", "__int__", "__invert__"))
            or name == "__setitem__"
            or options.get("inplace")
        ):
            raise refused(
                f"{name} would change a gathered copy of a tensor", "y = x * 2, not x *= 2"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **options)


def _places(
    old: Sequence[int], new: Sequence[int], parts: dict[int, Partition]
) -> dict[int, int | None]:
    """Return the dim of the new shape that each divided dim becomes; None if it is merged."""
    found: dict[int, int | None] = {}
    for dim in parts:
        before, rows = prod(old[:dim]), old[dim]
        found[dim] = next(
            (
                place
                for place, extent in enumerate(new)
                if extent == rows and prod(new[:place]) == before and place not in found.values()
            ),
            None,
        )
    return found


def _say_gather(values: SplitTensor, func: Any) -> None:
    bytes_of = values.numel() * values.element_size()
    if bytes_of > 64 << 20:
        values.groups.say_once(
            f"{layer()}: {func.__name__}",
            f"merges divided dims, so each rank gathers {size_text(bytes_of)}. HINT: pool "
            "before it",
        )


@handles(T.permute, torch.permute, T.transpose, torch.transpose, torch.movedim, T.movedim,
         T.swapaxes, torch.swapaxes, T.t, torch.t)  # fmt: skip
def permuted(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Move dims, and their partitions with them."""
    numbered = torch.empty(tuple(range(2, values.dim() + 2)), device="meta")
    moved = func(numbered, *args, **options).shape
    parts = {moved.index(dim + 2): one for dim, one in values.parts.items()}
    return values.like(func(values.local, *args, **options), parts)


@handles(torch.cat, torch.concat, torch.concatenate, torch.stack, anywhere=True)
def joined(func: Any, tensors: Sequence[Any], *args: Any, **options: Any) -> Any:
    """Concatenate or stack along a dim that is not divided."""
    first = first_split(tensors)
    assert first is not None
    dim = options.get("dim", options.get("axis", args[0] if args else 0))
    is_stack = func is torch.stack
    dim %= first.dim() + is_stack
    if not is_stack and any(isinstance(one, SplitTensor) and dim in one.parts for one in tensors):
        raise refused("cat along a divided dim of a tensor", ".whole() first")
    shape = list(first.shape)
    parts = merged_parts(list(tensors), torch.Size(shape))
    for one in tensors:
        others = [n for i, n in enumerate(one.shape) if i != dim or is_stack]
        wanted = [n for i, n in enumerate(shape) if i != dim or is_stack]
        if others != wanted:
            whole_shape(lambda _, *meta: func(meta, dim), first, *tensors)  # PyTorch's own error
    rows = [_rows(one, shape, dim, is_stack, parts, first) for one in tensors]
    if is_stack:
        parts = {one + (one >= dim): part for one, part in parts.items()}
    return first.like(func(rows, dim), parts)


def _rows(
    one: torch.Tensor, shape: list[int], dim: int, is_stack: bool, parts: Any, first: SplitTensor
) -> Any:
    own = list(shape)
    if not is_stack:
        own[dim] = one.size(dim)
    return aligned(one, torch.Size(own), parts, first)


@handles(T.chunk, torch.chunk, T.split, torch.split, T.unbind, torch.unbind,
         torch.tensor_split, T.tensor_split)  # fmt: skip
def cut(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Cut along a dim that is not divided."""
    dim = options.get("dim")
    if dim is None:
        at = 0 if func in (T.unbind, torch.unbind) else 1
        dim = args[at] if len(args) > at else 0
    dim %= values.dim()
    if dim in values.parts:
        raise refused(f"{func.__name__} along a divided dim of a tensor", ".whole() first")
    pieces = func(values.local, *args, **options)
    is_unbind = func in (T.unbind, torch.unbind)
    parts = {one - (is_unbind and one > dim): part for one, part in values.parts.items()}
    return tuple(values.like(one, parts) for one in pieces)


@handles(T.narrow, torch.narrow, T.select, torch.select, T.index_select, torch.index_select)
def picked(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Pick from a dim that is not divided, or a range of one that is."""
    whole_shape(func, values, *args, **options)  # PyTorch's checks
    names = ("dim", "start", "length") if func in (T.narrow, torch.narrow) else ("dim", "index")
    given = dict(zip(names, args, strict=False)) | options
    dim, args = given.pop("dim") % values.dim(), tuple(given[name] for name in names[1:])
    options = {}
    is_select = func in (T.select, torch.select)
    if dim in values.parts:
        if func in (T.narrow, torch.narrow):
            start = args[0] % values.size(dim) if args[0] < 0 else args[0]
            return _sliced(values, dim, start, start + args[1])
        raise refused(f"{func.__name__} along a divided dim of a tensor", ".whole() first")
    parts = {one - (is_select and one > dim): part for one, part in values.parts.items()}
    return values.like(func(values.local, dim, *args, **options), parts)


@handles(T.__getitem__)
def item(func: Any, values: SplitTensor, index: Any) -> Any:
    """Index dims that are not divided; slices of those that are, with step 1."""
    if isinstance(values, SplitTensor) and not _has_split(index):
        return _indexed(values, index)
    if isinstance(index, SplitTensor) and index.dtype == torch.bool:
        raise refused("a mask selects positions of a tensor", "multiply by the mask")
    raise refused("an index that is a tensor", ".whole() first")


def _has_split(index: Any) -> bool:
    return first_split([index]) is not None


def _indexed(values: SplitTensor, index: Any) -> Any:
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(one, (torch.Tensor, list)) for one in items):
        places = [i for i, one in enumerate(items) if isinstance(one, (torch.Tensor, list))]
        if places != [0] or 0 in values.parts or getattr(items[0], "ndim", 1) != 1:
            raise refused("a list of indices of a tensor", ".index_select or .whole()")
        if getattr(items[0], "dtype", None) == torch.bool:
            items[0] = items[0].nonzero().flatten()
    used = sum(one is not None and one is not Ellipsis for one in items)
    if Ellipsis in [one for one in items if not isinstance(one, torch.Tensor)]:
        at = next(i for i, one in enumerate(items) if one is Ellipsis)
        items[at : at + 1] = [slice(None)] * (values.dim() - used)
    else:
        items += [slice(None)] * (values.dim() - used)
    local_items: list[Any] = []
    dim, parts, current, out = 0, {}, values, 0
    for one in items:
        if one is None:
            local_items.append(None)
            out += 1
            continue
        if dim in values.parts:
            if not isinstance(one, slice) or one.step not in (None, 1):
                raise refused(
                    "an index other than a range on a divided dim of a tensor", ".whole() first"
                )
            start, stop, _ = one.indices(values.size(dim))
            if (start, stop) != (0, values.size(dim)):
                current = _sliced(current, dim, start, max(start, stop))
            parts[out] = current.parts[dim]
            one = slice(None)
        local_items.append(one)
        out += not hasattr(one, "__index__") or isinstance(one, torch.Tensor)
        dim += 1
    return values.like(current.local[tuple(local_items)], parts)


def _sliced(values: SplitTensor, dim: int, start: int, stop: int) -> SplitTensor:
    """Return a range of rows of a divided dim; rows stay where they are."""
    old = values.parts[dim]
    bounds = tuple(min(max(one, start), stop) - start for one in old.bounds)
    new = Partition(old.axis, bounds)
    wanted = rows_of([(a + start, b + start) for a, b in new.parts()])
    local = fetch(values.local, dim, old, wanted, values.groups.lines[old.axis])
    return SplitTensor(local, values.parts | {dim: new}, values.groups)


@handles(T.expand, T.expand_as, T.repeat, torch.tile, T.tile, torch.repeat_interleave)
def expanded(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Repeat along dims that are not divided."""
    if func not in (T.expand, T.expand_as, T.repeat):
        raise refused(f"{func.__name__} of a tensor", ".repeat, or .whole() first")
    if isinstance(args[0], torch.Tensor):
        args, func = (tuple(args[0].shape),), T.expand
    given = list(args[0]) if isinstance(args[0], (tuple, list)) else list(args)
    shift = len(given) - values.dim()
    parts = {dim + shift: one for dim, one in values.parts.items()}
    for dim, one in parts.items():
        if func is T.repeat and given[dim] != 1:
            raise refused("repeat along a divided dim of a tensor", ".whole() first")
        if func is T.expand:
            if given[dim] not in (-1, one.rows):
                raise refused("expand along a divided dim of a tensor", ".whole() first")
            given[dim] = -1
    return values.like(func(values.local, *given), parts)


@handles(torch.pixel_shuffle, F.pixel_shuffle, torch.pixel_unshuffle, F.pixel_unshuffle,
         F.channel_shuffle, torch.channel_shuffle)  # fmt: skip
def shuffled(func: Any, values: SplitTensor, factor: int) -> Any:
    """Move channels into positions and back; rows stay with their neighbours."""
    count = values.dim()
    name = func.__name__
    if any(dim < count - 2 for dim in values.parts) and name != "channel_shuffle":
        raise refused(f"{name} got samples or channels of a tensor", ".whole() first")
    if name == "channel_shuffle":
        if any(dim < 2 for dim in values.parts):
            raise refused(f"{name} got samples or channels of a tensor", ".whole() first")
        return values.like(func(values.local, factor))
    shape = whole_shape(func, values, factor)
    if name == "pixel_shuffle":
        parts = {d: Partition(p.axis, tuple(b * factor for b in p.bounds))
                 for d, p in values.parts.items()}  # fmt: skip
        return values.like(func(values.local, factor), parts)
    parts = {d: p.scaled(shape[d]) for d, p in values.parts.items()}
    fine = {d: Partition(p.axis, tuple(b * factor for b in p.bounds)) for d, p in parts.items()}
    moved = values.moved(fine)
    return values.like(func(moved.local, factor), parts)
