"""Blocks of the divided dim: parts of a dim that are divided alike, such as queries and keys."""

from typing import Any

import torch

from ...divided.divided_tensor import NO_RULE, divided_tensors, named_functions
from ...divided.views import joined, untouched
from ..split_tensor import SplitTensor, rule_for
from ..splits import Split


@rule_for(*named_functions("chunk", "split", "tensor_split"))
def divide(func: Any, x: SplitTensor, how: Any, dim: int = 0) -> Any:
    """Divide a dim into parts: another dim, or the blocks of the divided one."""
    dim %= x.dim()
    if dim != x.division.dim:
        return untouched(func, x, how, dim)
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


@rule_for(*named_functions("cat", "concat", "concatenate"), anywhere=True)
def join(func: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    """Join tensors along another dim, or divided alike along the divided one."""
    first = next(divided_tensors(tensors))
    split, dim = first.division, dim % first.dim()
    if dim != split.dim:
        return joined(func, tensors, dim, **kwargs)
    is_alike = all(isinstance(t, SplitTensor) and t.division.dim == dim for t in tensors)
    inner = {t.local.shape[dim] // t.division.blocks for t in tensors if is_alike}
    if len(inner) != 1 or kwargs:
        return NO_RULE
    found = torch.cat([t.local for t in tensors], dim)
    return SplitTensor.of(found, Split(dim, sum(t.division.blocks for t in tensors)), first.axis)
