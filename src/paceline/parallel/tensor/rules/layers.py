"""Sums, normalization, pooling, dropout, losses, and functions of blocks or of the memory order."""

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_map

from ...divided.divided_tensor import NO_RULE, as_whole, divided_tensors, named_functions
from ...divided.rules import joined, untouched
from ..exchange import total
from ..split_tensor import SplitTensor, memory_order, piece_at, rule_for
from ..splits import Split

# Cross entropy of logits whose classes (vocabulary) are divided over the ranks.
#
# Each rank exchanges three numbers for each sample, and never gathers the logits.


@rule_for(F.cross_entropy)
def cross_entropy(
    func: Any,
    x: SplitTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute the cross entropy of this rank's classes, and add those of all ranks."""
    dim = 1 if x.dim() > 1 else 0
    if isinstance(target, SplitTensor) or size_average is not None or reduce is not None:
        return NO_RULE
    if x.division != Split(dim) or not 0 <= label_smoothing <= 1:
        return NO_RULE
    if reduction not in ("none", "mean", "sum"):
        return NO_RULE
    are_classes = not target.is_floating_point()
    without_classes = x.shape[:dim] + x.shape[dim + 1 :]
    if target.shape != (without_classes if are_classes else x.shape):
        return NO_RULE
    if target.dtype is not torch.int64 if are_classes else ignore_index >= 0:
        return NO_RULE
    terms = _Terms(x, dim, as_whole(weight))
    if are_classes:
        losses, norm = terms.of_classes(target, ignore_index, label_smoothing)
    else:
        losses = terms.of_probabilities(target, label_smoothing)
        norm = torch.tensor(without_classes.numel(), device=losses.device)
    if reduction != "none":
        losses = losses.sum() / (norm if reduction == "mean" else 1)
    return losses.to(terms.result_dtype)


class _Terms:
    """Sums over all classes, for each sample.

    Attributes:
        result_dtype: The dtype of PyTorch's result.
    """

    def __init__(self, x: SplitTensor, dim: int, weight: torch.Tensor | None) -> None:
        local = x.local
        is_autocast = torch.is_autocast_enabled(local.device.type)
        computed = torch.promote_types(local.dtype, torch.float32)  # as PyTorch's kernels do
        self.result_dtype = computed if is_autocast else local.dtype
        self.local, self.dim, self.axis = local.to(computed), dim, x.axis
        self.classes = x.shape[dim]
        self.whole_weight = None if weight is None else weight.to(computed)
        self.weight: torch.Tensor | None = None
        if self.whole_weight is not None:
            own = piece_at(self.whole_weight, 0, x.division, x.axis)
            self.weight = own.view(-1, *(1,) * (x.dim() - 1 - dim))
        largest = self.local.detach().amax(dim)
        self.largest = torch.stack(x.axis.pieces(largest)).amax(0)

    def _sums(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the logarithm of the sum of exponentials, and sums of the ranks' parts."""
        exponentials = (self.local - self.largest.unsqueeze(self.dim)).exp().sum(self.dim)
        sums, *others = total(torch.stack([exponentials, *parts]), self.axis).unbind()
        return sums.log() + self.largest, *others

    def of_classes(
        self, target: torch.Tensor, ignored: int, smoothing: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of each sample, and by what a mean divides their sum."""
        is_used = target != ignored
        is_wrong = is_used & ((target < 0) | (target >= self.classes))
        if target.device.type == "cpu" and bool(is_wrong.any()):
            wrong = int(target[is_wrong][0])
            raise IndexError(f"Target {wrong} is out of bounds ({self.classes} classes)")
        own = target - self.axis.rank * self.local.shape[self.dim]
        is_own = is_used & (own >= 0) & (own < self.local.shape[self.dim])
        index = own.where(is_own, 0).unsqueeze(self.dim)
        picked = self.local.gather(self.dim, index).squeeze(self.dim).where(is_own, 0)
        weight: Any = 1.0
        if self.whole_weight is not None:
            weight = self.whole_weight[target.where(is_used & ~is_wrong, 0)]
        if smoothing:
            weighted = self.local if self.weight is None else self.local * self.weight
            logarithm, chosen, spread = self._sums(picked, weighted.sum(self.dim))
            whole = self.classes if self.whole_weight is None else self.whole_weight.sum()
            spread = logarithm * whole - spread
        else:
            (logarithm, chosen), spread = self._sums(picked), torch.zeros(())
        losses = (logarithm - chosen) * weight
        if smoothing:
            losses = losses * (1 - smoothing) + spread * (smoothing / self.classes)
        losses = losses.where(is_used, 0).masked_fill(is_wrong, float("nan"))
        return losses, (torch.ones_like(losses) * weight).where(is_used, 0).sum()

    def of_probabilities(self, target: torch.Tensor, smoothing: float) -> torch.Tensor:
        """Return the loss of each sample."""
        wanted = target.to(self.local.dtype)
        if smoothing:
            wanted = wanted * (1 - smoothing) + smoothing / self.classes
        own = piece_at(wanted, self.dim, Split(self.dim), self.axis)
        own = own if self.weight is None else own * self.weight
        parts = (own * self.local).sum(self.dim), own.sum(self.dim)
        logarithm, product, mass = self._sums(*parts)
        return logarithm * mass - product


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
    held = [t for t in own if isinstance(t, SplitTensor)]
    if isinstance(x, SplitTensor) and x.division.dim == 1 and not held:
        if any(t is not None for t in own):
            return NO_RULE  # statistics that are whole on each rank need all channels
        split, axis = x.division, x.axis
    elif held:
        split, axis = Split(1, held[0].division.blocks), held[0].axis
    else:
        return NO_RULE
    given = [None if t is None else piece_at(t, 0, split, axis) for t in (*own, weight, bias)]
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
    own = [None if t is None else piece_at(t, 0, x.division, x.axis) for t in (weight, bias)]
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
    return tree_map(lambda t: SplitTensor.of(t, x.division, x.axis), found)


# Blocks are parts of a dim that are divided alike, such as queries and keys in one weight.


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
    return tuple(SplitTensor.of(part, split, x.axis) for part in local)


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
