"""Sums, normalization and pooling."""

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_map

from ...divided.divided_tensor import NO_RULE, named_functions
from ...divided.views import untouched
from ..exchange import total
from ..split_tensor import SplitTensor, piece_at, rule_for
from ..splits import Split


@rule_for(*named_functions("sum", "mean"))
def sum_or_mean(func: Any, x: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    """Reduce any dims: that of the divided one is a sum over the ranks."""
    found = untouched(func, x, *args, **kwargs)
    if found is not NO_RULE or "out" in kwargs:
        return found
    found = total(func(x.local, *args, **kwargs), x.axis)
    return found if func.__name__ == "sum" else found / x.axis.size


@rule_for(F.layer_norm, getattr(F, "rms_norm", None))
def layer_norm(func: Any, x: SplitTensor, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Normalize dims that are whole."""
    if x.division.dim >= x.dim() - len(normalized_shape):
        return NO_RULE

    def piece(value: Any) -> Any:  # of weight or bias
        is_tensor = isinstance(value, torch.Tensor)
        return piece_at(value, None, x.division, x.axis) if is_tensor else value

    given = {name: piece(value) for name, value in kwargs.items()}
    found = func(x.local, normalized_shape, *map(piece, args), **given)
    return SplitTensor.of(found, x.division, x.axis)


@rule_for(F.batch_norm, anywhere=True)
def batch_norm(
    func: Any,
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Normalize this rank's channels, whose running statistics it holds."""
    own = (running_mean, running_var)
    held = [one for one in own if isinstance(one, SplitTensor)]
    if isinstance(x, SplitTensor) and x.division.dim == 1 and not held:
        if any(one is not None for one in own):
            return NO_RULE  # statistics that are whole on each rank need all channels
        split, axis = x.division, x.axis
    elif held:
        split, axis = Split(1, held[0].division.blocks), held[0].axis
    else:
        return NO_RULE
    given = [None if one is None else piece_at(one, 0, split, axis) for one in (*own, weight, bias)]
    found = func(piece_at(x, 1, split, axis), *given, *args, **kwargs)
    return SplitTensor.of(found, split, axis)


@rule_for(F.group_norm)
def group_norm(
    func: Any,
    x: SplitTensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Normalize this rank's groups."""
    if x.division != Split(1) or num_groups % x.axis.size:
        return NO_RULE
    own = [None if one is None else piece_at(one, 0, x.division, x.axis) for one in (weight, bias)]
    found = func(x.local, num_groups // x.axis.size, *own, eps)
    return SplitTensor.of(found, x.division, x.axis)


_POOLS = [f"{kind}_pool{n}d" for kind in ("max", "avg", "lp") for n in (1, 2, 3)]
_POOLS += [f"adaptive_{kind}_pool{n}d" for kind in ("max", "avg") for n in (1, 2, 3)]


@rule_for(*named_functions(*_POOLS, *(f"{name}_with_indices" for name in _POOLS)))
def pool(func: Any, x: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    """Pool channels or samples independently."""
    spatial = int(func.__name__.replace("_with_indices", "")[-2])
    if x.division.dim >= x.dim() - spatial:
        return NO_RULE
    return _divided(x, func(x.local, *args, **kwargs))


@rule_for(F.interpolate, F.upsample)
def interpolate(func: Any, x: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    """Resize channels or samples independently."""
    if x.division.dim > 1:
        return NO_RULE
    return _divided(x, func(x.local, *args, **kwargs))


@rule_for(F.pad)
def pad(func: Any, x: SplitTensor, pad: Any, *args: Any, **kwargs: Any) -> Any:
    """Pad other dims."""
    if not isinstance(pad, (tuple, list)) or x.division.dim >= x.dim() - len(pad) // 2:
        return NO_RULE
    return _divided(x, func(x.local, pad, *args, **kwargs))


def _divided(x: SplitTensor, found: Any) -> Any:
    """Return results that are divided like the input."""
    return tree_map(lambda one: SplitTensor.of(one, x.division, x.axis), found)
