"""Functions that change a tensor's shape: dims that are divided stay, or the tensor is gathered."""

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - PyTorch's name

from ...cost.layout_memory import size_text
from ..divided import views
from ..divided.divided_tensor import NO_RULE, divided_tensors, each_tensor, named_functions
from ..divided.module_names import layer
from .exchange import fetch, rows_of
from .partition import Partition
from .split_tensor import SplitTensor, refused, rule_for
from .windows import check_positions, whole_shape

T = torch.Tensor
MIN_SAID_BYTES = 64 << 20  # of a gathered view


@rule_for(
    *named_functions("reshape", "view", "flatten", "unflatten", "view_as", "reshape_as"),
)
def reshaped(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Give each divided dim its place in the new shape; gather where it is merged with others."""
    found = views.reshaped(func, values, *args, **options)
    if found is not NO_RULE:
        if len(found.parts) < len(values.parts):  # some dims were gathered
            found.local = found.local.as_subclass(GatheredView)
        return found
    if any(isinstance(one, torch.dtype) for one in (*args, *options.values())):
        raise refused("view(dtype) of a tensor", ".whole() first")
    return _gathered_view(func, values, *args, **options)


@rule_for(*named_functions("squeeze"))
def squeezed(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Remove dims of one row; gather where a divided one may be removed."""
    found = views.untouched(func, values, *args, **options)
    return _gathered_view(func, values, *args, **options) if found is NO_RULE else found


def _gathered_view(func: Any, values: SplitTensor, *args: Any, **options: Any) -> torch.Tensor:
    bytes_of = values.numel() * values.element_size()
    if bytes_of > MIN_SAID_BYTES:
        values.groups.say_once(
            f"{layer()}: {func.__name__}",
            f"merges divided dims, so each rank gathers {size_text(bytes_of)}. HINT: pool "
            "before it",
        )
    given = [tuple(one.shape) if isinstance(one, torch.Tensor) else one for one in args]
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
    items, dim = views.index_items(values, index), 0
    for place, one in enumerate(items):
        if one is None:
            continue
        if isinstance(one, (torch.Tensor, list)):
            if place or dim in values.parts or getattr(one, "ndim", 1) != 1:
                raise refused("a list of indices of a tensor", ".index_select or .whole()")
            values, items[place] = values.like(values.local[one]), slice(None)
        elif dim in values.parts:
            if not isinstance(one, slice) or one.step not in (None, 1):
                raise refused(
                    "an index other than a range on a divided dim of a tensor", ".whole() first"
                )
            start, stop, _ = one.indices(values.size(dim))
            if (start, stop) != (0, values.size(dim)):
                values = _sliced(values, dim, start, max(start, stop))
            items[place] = slice(None)
        dim += 1
    return views.item(func, values, tuple(items))


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
