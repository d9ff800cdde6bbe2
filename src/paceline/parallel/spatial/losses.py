"""Losses over positions, dropout, and prelu."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - PyTorch's name

from ...optim.norms import wide
from ..divided.divided_tensor import divided_tensors
from ..divided.elementwise import pointwise
from .exchange import sum_over
from .split_tensor import SplitTensor, merged_parts, part_of, refused, rows_at, rule_for

_ELEMENTWISE = [
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy),
    *(F.binary_cross_entropy_with_logits, F.kl_div, F.poisson_nll_loss, F.soft_margin_loss),
]


@rule_for(*_ELEMENTWISE, anywhere=True)
def elementwise_loss(func: Any, *args: Any, **options: Any) -> Any:
    """Loss of each position by itself, then sum or mean over all of them."""
    bound = _bound(func, args, options)
    reduction = bound.pop("reduction", "mean")
    _check_reduction(bound, reduction)
    if bound.get("weight") is not None and not func.__name__.startswith("binary_cross"):
        raise refused(f"{func.__name__} with weights over a tensor", "reduction='none', then weigh")
    tensors = [one for one in bound.values() if isinstance(one, torch.Tensor)]
    first = next(divided_tensors(tensors))
    shape = torch.broadcast_shapes(*(one.shape for one in tensors))
    parts = merged_parts(tensors, shape)
    given = {key: first.aligned(one, shape, parts) for key, one in bound.items()}
    each = func(**given, reduction="none")
    if reduction == "none":
        return first.like(each, parts)
    total = sum_over(wide(each).sum(), first.groups.over(parts, parts))
    if reduction == "sum":
        return total.to(each.dtype)
    return (total / (shape[0] if reduction == "batchmean" else shape.numel())).to(each.dtype)


def _bound(func: Any, args: Any, options: Any) -> dict[str, Any]:
    """Return all arguments by name."""
    import inspect

    return dict(inspect.signature(func).bind(*args, **options).arguments)


def _check_reduction(bound: dict[str, Any], reduction: str) -> None:
    for name in ("size_average", "reduce"):
        if bound.pop(name, None) is not None:
            raise refused(f"{name}=... of a loss over a tensor", "reduction='mean'")
    if reduction not in ("none", "mean", "sum", "batchmean"):
        raise ValueError(f"{reduction} is not a valid value for reduction. HINT: 'mean'")


@rule_for(F.cross_entropy, F.nll_loss, anywhere=True)
def class_loss(func: Any, *args: Any, **options: Any) -> Any:
    """Cross entropy of each position; its mean is weighted over all positions."""
    bound = _bound(func, args, options)
    reduction = bound.pop("reduction", "mean")
    _check_reduction(bound, reduction)
    values, target = bound.pop("input"), bound.pop("target")
    if not isinstance(values, SplitTensor):
        raise refused("a loss got whole outputs and targets from a tensor", "target.whole()")
    if any(dim == 1 or dim == 0 for dim in values.parts):
        raise refused(f"{func.__name__} got samples or classes of a tensor", ".whole() first")
    classes = target.dim() == values.dim()  # probabilities
    where = values.parts if classes else {dim - 1: one for dim, one in values.parts.items()}
    expected = list(values.shape) if classes else [values.size(0), *values.shape[2:]]
    if list(target.shape) != expected:
        raise ValueError(
            f"{func.__name__}: the targets have shape {tuple(target.shape)}, and outputs of shape "
            f"{tuple(values.shape)} need {tuple(expected)}. HINT: indices of classes for each "
            "position"
        )
    known = rows_at(target, where, values.groups)
    each = func(values.local, known, reduction="none", **bound)
    parts = {dim - 1: one for dim, one in values.parts.items()}
    if reduction == "none":
        return values.like(each, parts)
    group = values.groups.over(values.parts, values.parts)
    total = sum_over(wide(each).sum(), group)
    if reduction == "sum":
        return total.to(each.dtype)
    if classes:
        return (total / (values.numel() // values.size(1))).to(each.dtype)
    counted = known != bound.get("ignore_index", -100)
    weight = bound.get("weight")
    shares = counted.to(total.dtype)
    if weight is not None:
        shares = shares * weight[known.where(counted, 0)]
    return (total / sum_over(shares.sum(), group)).to(each.dtype)


@contextmanager
def own_random_numbers(values: SplitTensor) -> Iterator[None]:
    """Draw numbers that differ between parts, and are equal on ranks that hold the same part.

    The common stream goes on equally.
    """
    offset = values.groups.offset({one.axis for one in values.parts.values()})
    seed = int(torch.randint(1 << 62, ()).item())
    devices = [values.device] if values.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed((seed + 0x9E3779B97F4A7C15 * (offset + 1)) % (1 << 63))
        yield


@rule_for(
    F.prelu,
    torch.prelu,
)
def prelu(func: Any, values: SplitTensor, weight: Any) -> Any:
    """Compute each position; the weights are of channels."""
    if isinstance(weight, SplitTensor) or 1 in values.parts:
        raise refused("prelu needs whole channels of a tensor", ".whole() first")
    return values.like(func(values.local, weight))


@rule_for(
    *(F.dropout, torch.dropout, torch.dropout_, F.alpha_dropout, torch.alpha_dropout),
    *(torch.rand_like, torch.randn_like, torch.bernoulli, torch.Tensor.bernoulli_),
    *(torch.Tensor.normal_, torch.Tensor.uniform_, F.rrelu, torch.rrelu),
)
def random(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Each rank draws for its positions."""
    if any(isinstance(one, torch.Generator) for one in (*args, *options.values())):
        raise refused(f"{func.__name__} with a generator for a tensor", "leave generator out")
    if options.get("training") is False:
        return values.like(func(values.local, *args, **options))
    if values.groups.is_compared:
        given = values.whole().clone()
        whole = func(given, *args, **options)
        part = part_of(whole, values.parts, values.groups)
        is_changed = whole is given
        return pointwise(torch.Tensor.copy_, values, part) if is_changed else values.like(part)
    with own_random_numbers(values):
        result = func(values.local, *args, **options)
    return values if result is values.local else values.like(result)


@rule_for(
    *(F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout),
    *(torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout),
)
def channel_dropout(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Drop whole channels: all ranks of a sample draw the same ones."""
    if any(dim < 2 for dim in values.parts):
        raise refused(f"{func.__name__} got samples or channels of a tensor", ".whole() first")
    local = values.local
    if not local.numel():  # it would draw nothing, and other ranks do
        func(local.new_ones(*local.shape[:2], *[1] * (local.dim() - 2)), *args, **options)
    result = func(local, *args, **options)
    return values if result is local else values.like(result)
