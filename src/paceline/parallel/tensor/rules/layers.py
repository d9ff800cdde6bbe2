"""Functions along some dims: normalization, softmax, sums, pooling."""

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from ..exchange import total
from ..split_tensor import NO_RULE, SplitTensor, named_functions, rule_for
from ..splits import Split
from .alignment import piece_at, wrap


@rule_for(*named_functions("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "flip", "glu"))
def along(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute along another dim."""
    x, *others = args
    if func in (torch.flip, torch.Tensor.flip) and len(others) != 1:
        return NO_RULE
    default = -1 if func is F.glu else None
    dim = others[0] if others else kwargs.get("dim", default)
    if not isinstance(dim, int) or dim % x.dim() == x.division.dim:
        return NO_RULE
    return wrap(func(x.local, *others, **kwargs), x.division, x.axis)


@rule_for(
    *named_functions("sum", "mean", "amax", "amin", "nansum", "all", "any", "logsumexp", "prod"),
    *named_functions("var", "std", "norm", "max", "min", "argmax", "argmin", "median", "sort"),
    *named_functions("topk", "var_mean", "std_mean"),
)
def reduce(func: Any, args: Any, kwargs: Any) -> Any:
    """Reduce another dim; the sum and mean of the divided one are sums over the ranks."""
    x, *others = args
    if not isinstance(x, SplitTensor) or "out" in kwargs:
        return NO_RULE
    name = func.__name__
    takes_number = name in ("norm", "topk")  # before the dim
    place = 1 if takes_number else 0
    dims = others[place] if len(others) > place else kwargs.get("dim")
    keeps = kwargs.get("keepdim", others[place + 1] if len(others) > place + 1 else False)
    if name in ("var", "std", "var_mean", "std_mean", "norm") and len(others) > place + 1:
        return NO_RULE
    if not isinstance(keeps, bool):  # further dims
        return NO_RULE
    is_kept = name in ("sort", "topk") or keeps is True
    if name in ("sort", "topk") and dims is None:
        dims = -1
    if isinstance(dims, bool) or not isinstance(dims, (int, tuple, list, type(None))):
        return NO_RULE
    chosen = {d % x.dim() for d in ([dims] if isinstance(dims, int) else dims or range(x.dim()))}
    if x.division.dim not in chosen:
        gone = 0 if is_kept else sum(dim < x.division.dim for dim in chosen)
        found = func(x.local, *others, **kwargs)
        return wrap(found, x.division.at(x.division.dim - gone), x.axis)
    if name not in ("sum", "mean"):
        return NO_RULE
    found = total(func(x.local, *others, **kwargs), x.axis)
    return found if name == "sum" else found / x.axis.size


@rule_for(F.layer_norm, getattr(F, "rms_norm", None))
def layer_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Normalize dims that are whole."""
    names = ["input", "normalized_shape", "weight", "bias", "eps"]
    if func is not F.layer_norm:
        names.remove("bias")
    given = dict(zip(names, args, strict=False)) | kwargs
    x = given.pop("input")
    if not isinstance(x, SplitTensor) or x.division.dim >= x.dim() - len(given["normalized_shape"]):
        return NO_RULE
    for name in ("weight", "bias"):
        if given.get(name) is not None:
            given[name] = piece_at(given[name], None, x.division, x.axis)
    return SplitTensor.of(func(x.local, **given), x.division, x.axis)


@rule_for(F.batch_norm)
def batch_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Normalize this rank's channels, whose running statistics it holds."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training")
    given = dict(zip((*names, "momentum", "eps"), args, strict=False)) | kwargs
    x = given.pop("input")
    own = [given.get(name) for name in ("running_mean", "running_var")]
    held = [one for one in own if isinstance(one, SplitTensor)]
    if isinstance(x, SplitTensor) and x.division.dim == 1 and not held:
        if any(one is not None for one in own):
            return NO_RULE  # statistics that are whole on each rank need all channels
        split, axis = x.division, x.axis
    elif held:
        split, axis = Split(1, held[0].division.blocks), held[0].axis
    else:
        return NO_RULE
    local = piece_at(x, 1, split, axis)
    for name in ("running_mean", "running_var", "weight", "bias"):
        if given.get(name) is not None:
            given[name] = piece_at(given[name], 0, split, axis)
    return SplitTensor.of(func(local, **given), split, axis)


@rule_for(F.group_norm)
def group_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Normalize this rank's groups."""
    names = ("input", "num_groups", "weight", "bias", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    x, groups = given.pop("input"), given["num_groups"]
    if not isinstance(x, SplitTensor) or x.division != Split(1) or groups % x.axis.size:
        return NO_RULE
    for name in ("weight", "bias"):
        if given.get(name) is not None:
            given[name] = piece_at(given[name], 0, x.division, x.axis)
    given["num_groups"] = groups // x.axis.size
    return SplitTensor.of(func(x.local, **given), x.division, x.axis)


_POOLS = [f"{kind}_pool{n}d" for kind in ("max", "avg", "lp") for n in (1, 2, 3)]
_POOLS += [f"adaptive_{kind}_pool{n}d" for kind in ("max", "avg") for n in (1, 2, 3)]


@rule_for(*named_functions(*_POOLS, *(f"{name}_with_indices" for name in _POOLS)))
def pool(func: Any, args: Any, kwargs: Any) -> Any:
    """Pool channels or samples independently."""
    x, *others = args
    spatial = int(func.__name__.replace("_with_indices", "")[-2])
    if not isinstance(x, SplitTensor) or x.division.dim >= x.dim() - spatial:
        return NO_RULE
    return wrap(func(x.local, *others, **kwargs), x.division, x.axis)


@rule_for(F.interpolate, F.upsample)
def interpolate(func: Any, args: Any, kwargs: Any) -> Any:
    """Resize channels or samples independently."""
    x, *others = args
    if not isinstance(x, SplitTensor) or x.division.dim > 1:
        return NO_RULE
    return wrap(func(x.local, *others, **kwargs), x.division, x.axis)


@rule_for(F.pad)
def pad(func: Any, args: Any, kwargs: Any) -> Any:
    """Pad other dims."""
    given = dict(zip(("input", "pad", "mode", "value"), args, strict=False)) | kwargs
    x, padding = given.pop("input"), given["pad"]
    if not isinstance(padding, (tuple, list)) or not isinstance(x, SplitTensor):
        return NO_RULE
    if x.division.dim >= x.dim() - len(padding) // 2:
        return NO_RULE
    return wrap(func(x.local, **given), x.division, x.axis)
