"""Functions that need whole dims: changes of shape, Fourier transforms, attention.

A divided dim that a change of shape leaves remains divided. A transform is computed with the tensor
divided along another dim (channels, samples), attention with the heads divided: the ranks exchange
blocks before and after it. Where that is not possible, the tensors are gathered.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - PyTorch's name

from ...cost.layout_memory import size_text
from ..divided import rules
from ..divided.divided_tensor import (
    NO_RULE,
    divided_tensors,
    each_tensor,
    is_in_place,
    named_functions,
)
from ..divided.module_names import layer
from .exchange import fetch, rows_of
from .layers import own_random_numbers
from .partition import Partition
from .split_tensor import SplitTensor, refused, rule_for, say_gathered
from .windows import check_positions, whole_shape

T = torch.Tensor
MIN_SAID_BYTES = 64 << 20  # of a gathered view


@rule_for(
    *named_functions("reshape", "view", "flatten", "unflatten", "view_as", "reshape_as"),
)
def reshaped(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Give each divided dim its place in the new shape; gather where it is merged with others."""
    found = rules.reshaped(func, values, *args, **options)
    if found is not NO_RULE:
        if len(found.parts) < len(values.parts):  # some dims were gathered
            found.local = found.local.as_subclass(GatheredView)
        return found
    if any(isinstance(arg, torch.dtype) for arg in (*args, *options.values())):
        raise refused("view(dtype) of a tensor", ".whole() first")
    return _gathered_view(func, values, *args, **options)


@rule_for(*named_functions("squeeze"))
def squeezed(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Remove dims of one row; gather where a divided one may be removed."""
    found = rules.untouched(func, values, *args, **options)
    return _gathered_view(func, values, *args, **options) if found is NO_RULE else found


def _gathered_view(func: Any, values: SplitTensor, *args: Any, **options: Any) -> torch.Tensor:
    bytes_of = values.numel() * values.element_size()
    if bytes_of > MIN_SAID_BYTES:
        values.groups.say_once(
            f"{layer()}: {func.__name__}",
            f"merges divided dims, so each rank gathers {size_text(bytes_of)}. HINT: pool "
            "before it",
        )
    given = [tuple(arg.shape) if isinstance(arg, torch.Tensor) else arg for arg in args]
    named = {T.view_as: T.view, T.reshape_as: T.reshape}.get(func, func)
    whole: torch.Tensor = named(values.whole(), *given, **options)
    return whole.as_subclass(GatheredView)


class GatheredView(torch.Tensor):
    """What a view of a divided tensor has gathered: a copy, which must not be changed in place."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, SplitTensor) for kind in types):
            return NotImplemented
        name, options = getattr(func, "__name__", ""), kwargs or {}
        is_changing = is_in_place(func, options) and name not in ("requires_grad_", "__set__")
        if is_changing and isinstance(args[0] if args else None, cls):
            raise refused(
                f"{name} would change a gathered copy of a tensor", "y = x * 2, not x *= 2"
            )
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **options)
            own = args[0] if args and isinstance(args[0], cls) else None
            return found if own is None else each_tensor(found, own._as_own_view)

    def _as_own_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a result as a tensor of this class if it is a view of this one."""
        is_view = tensor.untyped_storage().data_ptr() == self.untyped_storage().data_ptr()
        return tensor.as_subclass(GatheredView) if is_view and tensor is not self else tensor


def without_guard(tensor: torch.Tensor) -> torch.Tensor:
    """Return a gathered view as a plain tensor, and another tensor as it is."""
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, GatheredView) else tensor


@rule_for(*named_functions("narrow", "index_select"))
def picked(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Pick from a dim that is not divided, or a range of one that is."""
    whole_shape(func, values, *args, **options)  # PyTorch's checks
    names = ("dim", "start", "length") if func.__name__ == "narrow" else ("dim", "index")
    given = dict(zip(names, args, strict=False)) | options
    dim, others = given["dim"] % values.dim(), [given[name] for name in names[1:]]
    if dim not in values.parts:
        return values.like(func(values.local, dim, *others))
    if func.__name__ != "narrow":
        return NO_RULE
    start = others[0] % values.size(dim) if others[0] < 0 else others[0]
    return _sliced(values, dim, start, start + others[1])


@rule_for(T.__getitem__)
def item(func: Any, values: SplitTensor, index: Any) -> Any:
    """Index dims that are not divided; slices of those that are, with step 1."""
    mask = next(divided_tensors(index), None)
    if mask is not None:
        if mask.dtype == torch.bool:
            raise refused("a mask selects positions of a tensor", "multiply by the mask")
        raise refused("an index that is a tensor", ".whole() first")
    items, dim = rules.index_items(values, index), 0
    for place, key in enumerate(items):
        if key is None:
            continue
        if isinstance(key, (torch.Tensor, list)):
            if place or dim in values.parts or getattr(key, "ndim", 1) != 1:
                raise refused("a list of indices of a tensor", ".index_select or .whole()")
            values, items[place] = values.like(values.local[key]), slice(None)
        elif dim in values.parts:
            if not isinstance(key, slice) or key.step not in (None, 1):
                raise refused(
                    "an index other than a range on a divided dim of a tensor", ".whole() first"
                )
            start, stop, _ = key.indices(values.size(dim))
            if (start, stop) != (0, values.size(dim)):
                values = _sliced(values, dim, start, max(start, stop))
            items[place] = slice(None)
        dim += 1
    return rules.item(func, values, tuple(items))


def _sliced(values: SplitTensor, dim: int, start: int, stop: int) -> SplitTensor:
    """Return a range of rows of a divided dim; rows stay where they are."""
    old = values.parts[dim]
    bounds = tuple(min(max(bound, start), stop) - start for bound in old.bounds)
    new = Partition(old.axis, bounds)
    wanted = rows_of([(a + start, b + start) for a, b in new.parts()])
    local = fetch(values.local, dim, old, wanted, values.groups.lines[old.axis])
    return SplitTensor(local, values.parts | {dim: new}, values.groups, values.is_free)


@rule_for(torch.pixel_shuffle, F.pixel_shuffle, torch.pixel_unshuffle, F.pixel_unshuffle,
         F.channel_shuffle, torch.channel_shuffle)  # fmt: skip
def shuffled(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Move channels into positions and back; rows stay with their neighbours."""
    (factor,) = (*args, *options.values())
    name = func.__name__
    check_positions(values, 2 if name == "channel_shuffle" else values.dim() - 2, name)
    if name == "channel_shuffle":
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


# Fourier transforms and attention

_OF_ONE_DIM = "fft ifft rfft irfft hfft ihfft"
_OF_TWO_DIMS = "fft2 ifft2 rfft2 irfft2"
_OF_ALL_DIMS = "fftn ifftn rfftn irfftn fftshift ifftshift"
_TO_POSITIONS = frozenset(["ifft", "irfft", "hfft", "ifft2", "irfft2", "ifftn", "irfftn"])


def _functions(names: str) -> list[Any]:
    return [getattr(torch.fft, name) for name in names.split()]


@rule_for(*_functions(f"{_OF_ONE_DIM} {_OF_TWO_DIMS} {_OF_ALL_DIMS}"))
def fourier(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Transform dims that are whole: divided ones among them are exchanged with another dim.

    Spectra remain divided along that dim; the results of inverse transforms along positions.
    """
    name = func.__name__.removeprefix("fft_")
    dims = _transformed(name, values, args, options)
    found: Any = values
    for dim, partition in values.parts.items():
        if dim not in dims:
            continue
        # channels, samples, then other positions
        others = [1, 0, *range(2, values.dim())]
        free = [
            d for d in others
            if d < values.dim() and d not in dims and d not in found.parts
            and values.size(d) >= partition.ranks
        ]  # fmt: skip
        if free:
            found = found.redivided(dim, free[0])
        else:
            say_gathered(name, [values])
            found = found.whole([dim])
    if not isinstance(found, SplitTensor):
        return func(found, *args, **options)
    result = found.like(func(found.local, *args, **options))
    return result.at_home() if name in _TO_POSITIONS and result.is_free else result


def _transformed(
    name: str, values: SplitTensor, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[int, ...]:
    """Return the dims of a transform."""
    is_shift = name.endswith("shift")
    given = dict(zip(("dim",) if is_shift else ("s", "dim", "norm"), args, strict=False)) | options
    dim, sizes = given.get("dim"), given.get("s")
    if dim is None and name in _OF_ONE_DIM.split():
        dim = -1
    if dim is None and name in _OF_TWO_DIMS.split():
        dim = (-2, -1)
    if dim is None and sizes is not None:
        dim = tuple(range(-len(sizes), 0))
    if dim is None:
        return tuple(range(values.dim()))
    return tuple(d % values.dim() for d in ((dim,) if isinstance(dim, int) else dim))


@rule_for(F.scaled_dot_product_attention, anywhere=True)
def attention(
    func: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Attention: each rank computes some heads, or its queries with all keys and values.

    All is gathered where samples or features are divided.
    """
    given: tuple[Any, ...] = (query, key, value)
    split = next(t for t in (*given, attn_mask) if isinstance(t, SplitTensor))
    rows = query.dim() - 2
    is_along = isinstance(query, SplitTensor) and set(query.parts) == {rows}
    has_both = is_causal and attn_mask is not None  # PyTorch's own error
    # the numbers of dropout are compared with those of one process
    if not is_along or (dropout_p and split.groups.is_compared) or has_both:
        tensors = _gathered("attention", {"q": query, "k": key, "v": value, "m": attn_mask})
        return func(*tensors.values(), dropout_p, is_causal, **options)
    assert isinstance(query, SplitTensor)
    options["dropout_p"] = dropout_p
    with own_random_numbers(query) if dropout_p else nullcontext():
        has_groups = bool(options.get("enable_gqa"))
        if all(_has_heads(t, query, has_groups) for t in given):
            parts = [t.redivided(rows, rows - 1) for t in given]
            heads = parts[0].parts
            if attn_mask is not None:
                shape = torch.Size((*query.shape[:-1], key.size(-2)))
                attn_mask = query.aligned(attn_mask, shape, heads)
            local = func(*(t.local for t in parts), attn_mask, is_causal=is_causal, **options)
            result = SplitTensor(local, heads, query.groups)
            own = {rows: query.parts[rows]}
            local = result.redivided(rows - 1, rows, own[rows]).local
        else:
            if is_causal:
                size = (query.size(-2), key.size(-2))
                attn_mask = torch.ones(size, dtype=torch.bool, device=query.device).tril()
            own = {rows: query.parts[rows]}
            if attn_mask is not None:
                shape = torch.Size((*query.shape[:-1], key.size(-2)))
                attn_mask = query.aligned(attn_mask, shape, own)
            whole = _gathered("attention", {"k": key, "v": value})
            local = func(query.local, *whole.values(), attn_mask, **options)
    return query.like(local, own)


def _has_heads(tensor: Any, query: SplitTensor, has_groups: bool) -> bool:
    """Return whether heads [..., heads, rows, features] of a tensor can be divided."""
    rows, heads = tensor.dim() - 2, tensor.dim() - 3
    if not isinstance(tensor, SplitTensor) or tensor.dim() != query.dim() or heads < 0:
        return False
    if tensor.parts.keys() != {rows} or tensor.parts[rows].axis != query.parts[rows].axis:
        return False
    if tensor.size(heads) != query.size(heads) and not has_groups:
        return False
    return bool(tensor.size(heads) % tensor.parts[rows].ranks == 0)


@rule_for(F.multi_head_attention_forward, anywhere=True)
def heads(func: Any, *args: Any, **options: Any) -> Any:
    """Attention of torch.nn.MultiheadAttention [length, batch, features]."""
    query = args[0] if args else options["query"]
    if isinstance(query, SplitTensor) and query.dim() == 3 and query.parts.keys() == {0}:
        found = rules.multi_head_attention(nullcontext(), *args, **options)
        if found is not NO_RULE:
            return found
    whole = _gathered("attention", dict(enumerate(args)) | options)
    return func(*[whole.pop(number) for number in range(len(args))], **whole)


def _gathered(name: str, given: dict[Any, Any]) -> dict[Any, Any]:
    """Return arguments with whole tensors; a tensor that is given twice is gathered once."""
    parts = {id(arg): arg for arg in given.values() if isinstance(arg, SplitTensor)}
    if parts:
        say_gathered(name, parts.values())
    whole = {key: t.whole() for key, t in parts.items()}
    return {key: whole.get(id(arg), arg) for key, arg in given.items()}
