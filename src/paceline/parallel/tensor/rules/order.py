"""Functions that depend on blocks of the divided dim, or on the order of elements in memory.

Blocks are parts of a dim that are divided alike, such as queries and keys in one weight.
"""

from typing import Any

import torch

from ...divided.divided_tensor import NO_RULE, divided_tensors, named_functions
from ...divided.views import joined, untouched
from ..split_tensor import SplitTensor, memory_order, rule_for
from ..splits import Split


@rule_for(*named_functions("chunk", "split", "tensor_split"))
def divide(func: Any, x: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    """Divide a dim into parts: another dim, or the blocks of the divided one."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % x.dim()
    if dim != x.division.dim:
        return untouched(func, x, *args, **kwargs)
    names = [name for name in kwargs if name != "dim"]  # "chunks", "split_size", ...
    how = args[0] if args else kwargs[names[0]] if names else None
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


@rule_for(*named_functions("contiguous"))
def contiguous(
    func: Any, x: SplitTensor, memory_format: torch.memory_format = torch.contiguous_format
) -> Any:
    """Give the piece the order of memory that the whole tensor gets.

    A piece of extent 1 counts as contiguous in several orders, and would keep its own one.
    """
    found = x.local.contiguous(memory_format=memory_format)
    whole = torch.empty(x.shape, device="meta", memory_format=memory_format)
    if memory_order(found) != memory_order(whole):
        found = found.clone(memory_format=memory_format)
    return SplitTensor.of(found, x.division, x.axis)


@rule_for(*named_functions("dropout", "alpha_dropout", "feature_dropout", "dropout_"))
def dropout(
    func: Any,
    x: SplitTensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool = True,
) -> Any:
    """Drop the elements that one process would drop: the mask of the whole tensor, cut.

    All ranks of the axis draw the same numbers, so their generators stay equal.
    """
    if func not in (torch.nn.functional.dropout, torch.dropout):
        return NO_RULE
    if not (training and train) or p == 0.0:
        return x
    dropped = _masked(x, x.shape, x.division, p)
    if not inplace:
        return dropped
    x.local.copy_(dropped.local)
    return x


@rule_for(*named_functions("dropout1d", "dropout2d", "dropout3d"))
def channel_dropout(
    func: Any, x: SplitTensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Drop the channels that one process would drop."""
    spatial = int(func.__name__[-2])
    if inplace or x.dim() != spatial + 2 or x.division.dim > 1:
        return NO_RULE
    if not training or p == 0.0:
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
