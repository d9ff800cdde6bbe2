"""Layers that combine positions: sums, extremes, products, normalization, losses; and dropout."""

import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from math import inf, prod
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - PyTorch's name

from ...comm.group_device import gather_equal
from ...optim.norms import GlobalStatistics, GroupExchange, channel_sums, wide
from ..divided.divided_tensor import NO_RULE, divided_tensors, named_functions
from ..divided.module_names import layer
from ..divided.rules import Labels, pointwise, register_products, untouched
from .exchange import first_gradient_only, sum_over, summed
from .partition import Partition
from .split_tensor import (
    RULES,
    SplitTensor,
    merged_parts,
    part_of,
    refused,
    rows_at,
    rule_for,
    say_gathered,
)
from .windows import check_positions, whole_shape


def contract(
    compute: Callable[..., torch.Tensor],
    operands: Sequence[torch.Tensor],
    labels: Sequence[Labels],
    result: Labels,
) -> Any:
    """Compute a sum of products of matrices or of ``einsum``: each rank with its rows.

    An axis of the mesh divides one label: if it is in the result, the result is divided; otherwise
    each rank has a part of the sum.

    Args:
        compute: Called with plain operands.
        labels: Of each operand, the labels of its dims.
        result: Those of the result.
    """
    first = next(divided_tensors(list(operands)))
    divided = _divided_labels(operands, labels, result)
    pieces, gathered = [], []
    for operand, own in zip(operands, labels, strict=True):
        parts = {dim: divided[label] for dim, label in enumerate(own) if label in divided}
        # a dim of extent 1 is broadcast
        parts = {dim: part for dim, part in parts.items() if operand.size(dim) == part.rows}
        if isinstance(operand, SplitTensor):
            axes = {part.axis for part in parts.values()}
            if any(part.axis not in axes for part in operand.parts.values()):
                gathered.append(operand)
        pieces.append(rows_at(operand, parts, first.groups))
    if gathered:
        say_gathered("product", gathered)
    found = compute(*pieces)
    summed = frozenset(part.axis for label, part in divided.items() if label not in result)
    if summed:
        found = sum_over(found, first.groups.groups[summed])
    kept = {result.index(label): part for label, part in divided.items() if label in result}
    return first.like(found, kept)


def _divided_labels(
    operands: Sequence[torch.Tensor], labels: Sequence[Labels], result: Labels
) -> dict[Hashable, Partition]:
    """Return the partition of each label that is divided.

    Of several labels that one axis divides, it is one of the result, and of the largest operand.
    """
    found = [
        (label not in result, -operand.numel(), label, partition)
        for operand, own in zip(operands, labels, strict=True)
        if isinstance(operand, SplitTensor)
        for dim, partition in operand.parts.items()
        if partition.rows > 1  # one row may be broadcast
        for label in (own[dim],)
    ]
    divided: dict[Hashable, Partition] = {}
    for _, _, label, partition in sorted(found, key=lambda key: key[:2]):
        if partition.axis not in {part.axis for part in divided.values()}:
            divided.setdefault(label, partition)
    return divided


register_products(RULES, contract)


@rule_for(*named_functions("sum", "mean"))
def total_or_mean(
    func: Any,
    values: SplitTensor,
    dim: Any = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Any:
    """Sum or mean over any dims."""
    dims = _reduced_dims(dim, values)
    if not any(d in values.parts for d in dims):
        parts = _parts_after(values, dims, keepdim)
        return values.like(func(values.local, dims, keepdim, dtype=dtype), parts)
    if func.__name__ == "mean" and not (values.is_floating_point() or dtype is not None):
        func(torch.empty(0, dtype=values.dtype))  # PyTorch's own error
    local = (values.local if dtype else wide(values.local)).sum(dims, keepdim=keepdim, dtype=dtype)
    found = sum_over(local, values.groups.over(values.parts, dims))
    if func.__name__ == "mean":
        found = found / prod(values.size(d) for d in dims)
    if values.is_floating_point() and not dtype:
        found = found.to(values.dtype)
    return values.like(found, _parts_after(values, dims, keepdim))


def _reduced_dims(dim: Any, values: SplitTensor) -> tuple[int, ...]:
    if dim in (None, (), []):
        return tuple(range(values.dim()))
    given = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(arg % values.dim() for arg in given)


def _parts_after(values: SplitTensor, dims: tuple[int, ...], keepdim: bool) -> dict[int, Partition]:
    """Return the partitions of what is left after a reduction."""
    left = {dim: part for dim, part in values.parts.items() if dim not in dims}
    return {dim - (0 if keepdim else sum(d < dim for d in dims)): p for dim, p in left.items()}


@rule_for(*named_functions("var", "std"))
def variance(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Variance or standard deviation over any dims, from the deviations of the whole mean."""
    found = untouched(func, values, *args, **options)
    if found is not NO_RULE:
        return found
    given = list(args)
    unbiased = given.pop(0) if given and isinstance(given[0], bool) else None
    named = dict(zip(("dim", "unbiased", "keepdim"), given, strict=False)) | options
    unbiased, keepdim = named.get("unbiased", unbiased), bool(named.get("keepdim", False))
    dims = _reduced_dims(named.get("dim"), values)
    correction = named.get("correction")
    if correction is None:
        correction = int(True if unbiased is None else unbiased)
    count = prod(values.size(d) for d in dims)
    group = values.groups.over(values.parts, dims)
    func(torch.ones(2, dtype=values.dtype))  # PyTorch's own error
    local = wide(values.local)
    deviations = local - sum_over(local.sum(dims, keepdim=True), group) / count
    squares = deviations.square()
    if deviations.is_complex():
        squares = deviations.real.square() + deviations.imag.square()
    spread = sum_over(squares.sum(dims, keepdim=keepdim), group) / max(count - correction, 0)
    if func.__name__ == "std":
        is_zero = spread == 0  # where PyTorch's gradient is 0
        spread = spread.masked_fill(is_zero, 1).sqrt().masked_fill(is_zero, 0)
    if values.is_floating_point():
        spread = spread.to(values.dtype)
    return values.like(spread, _parts_after(values, dims, keepdim))


_OVER_DIMS = {name: getattr(torch, name) for name in ("amax", "amin", "any", "all")}
_OVER_DIMS |= {"max": torch.amax, "min": torch.amin}  # of all dims


@rule_for(*named_functions(*_OVER_DIMS))
def extreme(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Largest or smallest value, or whether any or all are true, over any dims."""
    given = (*args, *options.values())
    if any(isinstance(arg, torch.Tensor) for arg in given):  # max(a, b)
        return pointwise(func, values, *args, **options)
    found = untouched(func, values, *args, **options)
    name = func.__name__
    if found is not NO_RULE or options.keys() - {"dim", "keepdim"} or (
        name in ("max", "min") and given
    ):  # fmt: skip
        return found
    named = dict(zip(("dim", "keepdim"), args, strict=False)) | options
    dims, keepdim = _reduced_dims(named.get("dim"), values), bool(named.get("keepdim", False))
    whole_shape(_OVER_DIMS[name], values, dims)  # PyTorch's checks
    group = values.groups.over(values.parts, dims)
    apply: Any = _Extreme.apply
    found = apply(values.local, _OVER_DIMS[name], dims, group)
    return values.like(
        found if keepdim else found.squeeze(dims), _parts_after(values, dims, keepdim)
    )


class _Extreme(torch.autograd.Function):
    """Reduction without a sum, with its dims kept; equal values share the gradient as in PyTorch.

    The results of the ranks are gathered, as a maximum in a collective may lose NaN.
    """

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, func: Any, dims: tuple[int, ...], group: Any
    ) -> torch.Tensor:
        if all(local.size(dim) for dim in dims) or func in (torch.any, torch.all):
            own = func(local, dims, True)
        else:
            shape = [1 if dim in dims else rows for dim, rows in enumerate(local.shape)]
            own = local.new_full(shape, _least(func, local.dtype))
        is_bool = own.dtype == torch.bool
        each = gather_equal(own.view(torch.uint8) if is_bool else own, group)
        found: torch.Tensor = func(torch.stack(each).view(own.dtype), 0)
        ctx.dims, ctx.group, ctx.layer = dims, group, layer()
        ctx.save_for_backward(local, found)
        return found

    @staticmethod
    @first_gradient_only
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        local, found = ctx.saved_tensors
        is_equal = local == found
        count = summed(is_equal.sum(ctx.dims, keepdim=True), ctx.group)
        return is_equal * summed(gradient, ctx.group) / count, None, None, None


def _least(func: Any, dtype: torch.dtype) -> float:
    """Return the value that changes no maximum or minimum: that of a rank without rows."""
    if dtype.is_floating_point:
        return -inf if func is torch.amax else inf
    limits = torch.iinfo(torch.uint8 if dtype == torch.bool else dtype)
    return limits.min if func is torch.amax else limits.max


@rule_for(F.batch_norm)
def batch_norm(
    func: Any,
    values: SplitTensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Normalize each channel with the statistics of the whole batch."""
    check_positions(values, what="batch normalization")
    if not training:
        return values.like(func(values.local, running_mean, running_var, weight, bias, eps=eps))
    number = values.numel() // values.size(1)
    if number <= 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size "
            f"{tuple(values.shape)}"
        )
    exchange = GroupExchange(values.groups.over(values.parts, values.parts))
    apply: Any = GlobalStatistics.apply
    result, mean, spread, samples = apply(values.local, weight, bias, eps, exchange, True)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            unbiased = spread * (samples / (samples - 1))
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return values.like(result)


@rule_for(F.group_norm, torch.group_norm)
def group_norm(
    func: Any,
    values: SplitTensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    """Normalize groups of channels of each sample over all positions."""
    check_positions(values, what="group normalization")
    if values.size(1) % num_groups:
        raise ValueError(
            f"{values.size(1)} channels can't be divided into {num_groups} groups. HINT: a divisor "
            "of the channels"
        )
    return values.like(_normalized(values, num_groups, weight, bias, eps))


def _normalized(
    values: SplitTensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Normalize each group of channels of each sample."""
    group = values.groups.over(values.parts, values.parts)
    apply: Any = _GroupStatistics.apply
    count = prod(values.shape[1:]) // groups
    result: torch.Tensor = apply(values.local, weight, bias, groups, count, eps, group)
    return result


class _GroupStatistics(torch.autograd.Function):
    """Group normalization of parts; for backward it keeps its input and the statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        groups: int,
        count: int,
        eps: float,
        group: Any,
    ) -> torch.Tensor:
        rows = _grouped(local, local.size(0), groups)
        mean = summed(rows.sum(2), group) / count
        spread = summed((rows - mean.unsqueeze(2)).square().sum(2), group) / count
        inverse = torch.rsqrt(spread + eps)
        ctx.save_for_backward(local, weight, mean.flatten(), inverse.flatten())
        ctx.layer = layer()
        ctx.groups, ctx.count, ctx.group, ctx.has_bias = groups, count, group, bias is not None
        result = ((rows - mean.unsqueeze(2)) * inverse.unsqueeze(2)).view(local.shape)
        if weight is not None:
            result = result * _of_channels(weight, local)
        if bias is not None:
            result = result + _of_channels(bias, local)
        return result.to(local.dtype)

    @staticmethod
    @first_gradient_only
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        local, weight, mean, inverse = ctx.saved_tensors
        samples, channels = local.shape[:2]
        each = channels // ctx.groups
        rows, given = (_grouped(t, 1, samples * channels) for t in (local, gradient))
        means, inverses = (t.repeat_interleave(each) for t in (mean, inverse))
        of_weight, of_bias = channel_sums(
            given, rows, means, inverses
        )  # of each sample and channel
        weights = torch.ones_like(means) if weight is None else weight.repeat(samples)
        both = torch.stack([of_bias, of_weight]) * weights.to(means.dtype)
        sums = summed(both.view(2, -1, each).sum(2), ctx.group) / ctx.count
        shift, slope = sums.repeat_interleave(each, 1)
        found = rows - _of_rows(means)
        found.mul_(_of_rows(-inverses.square() * slope))
        found.addcmul_(given, _of_rows(weights * inverses)).add_(_of_rows(-inverses * shift))
        of_channels = [t.view(samples, channels).sum(0) for t in (of_weight, of_bias)]
        kind = gradient.dtype if weight is None else weight.dtype
        return (
            found.view(local.shape).to(local.dtype),
            of_channels[0].to(kind) if weight is not None else None,
            of_channels[1].to(kind) if ctx.has_bias else None,
            *(None, None, None, None),
        )


def _of_rows(vector: torch.Tensor) -> torch.Tensor:
    return vector.view(1, -1, 1)


def _grouped(values: torch.Tensor, samples: int, groups: int) -> torch.Tensor:
    """Return [samples, groups, rest]; 16-bit values as float32."""
    return wide(values).reshape(samples, groups, values.numel() // (samples * groups))


def _of_channels(vector: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return vector.view(-1, *[1] * (values.dim() - 2))


@rule_for(F.instance_norm)
def instance_norm(
    func: Any,
    values: SplitTensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    """Normalize each channel of each sample over all positions."""
    check_positions(values, what="instance normalization")
    if not use_input_stats:
        return values.like(
            F.batch_norm(values.local, running_mean, running_var, weight, bias, eps=eps)
        )
    if running_mean is not None:
        raise refused(
            "instance normalization with running statistics of a tensor",
            "track_running_stats=False",
        )
    return values.like(_normalized(values, values.size(1), weight, bias, eps))


@rule_for(F.layer_norm, torch.layer_norm)
def layer_norm(
    func: Any, values: SplitTensor, normalized_shape: Any, *args: Any, **options: Any
) -> Any:
    """Layer normalization over last dims that are not divided."""
    width = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    if any(dim >= values.dim() - width for dim in values.parts):
        raise refused("layer normalization over positions of a tensor", ".whole() first")
    return values.like(func(values.local, normalized_shape, *args, **options))


@rule_for(F.linear, anywhere=True)
def linear(func: Any, values: Any, weight: Any, bias: Any = None) -> Any:
    """Linear layer over the last dim."""
    if not isinstance(values, SplitTensor) or isinstance(weight, SplitTensor):
        raise refused("a linear layer with weights from a tensor", ".whole() first")
    if values.dim() - 1 not in values.parts:
        return values.like(func(values.local, weight, bias))
    batch = [("batch", dim) for dim in range(values.dim() - 1)]
    found = contract(F.linear, (values, weight), [(*batch, "in"), ("out", "in")], (*batch, "out"))
    return found if bias is None else found + bias


# losses, dropout and prelu

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
    tensors = [arg for arg in bound.values() if isinstance(arg, torch.Tensor)]
    first = next(divided_tensors(tensors))
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    parts = merged_parts(tensors, shape)
    given = {key: first.aligned(arg, shape, parts) for key, arg in bound.items()}
    each = func(**given, reduction="none")
    if reduction == "none":
        return first.like(each, parts)
    total = sum_over(wide(each).sum(), first.groups.over(parts, parts))
    if reduction == "sum":
        return total.to(each.dtype)
    return (total / (shape[0] if reduction == "batchmean" else shape.numel())).to(each.dtype)


def _bound(func: Any, args: Any, options: Any) -> dict[str, Any]:
    """Return all arguments by name."""
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
    where = values.parts if classes else {dim - 1: part for dim, part in values.parts.items()}
    expected = list(values.shape) if classes else [values.size(0), *values.shape[2:]]
    if list(target.shape) != expected:
        raise ValueError(
            f"{func.__name__}: the targets have shape {tuple(target.shape)}, and outputs of shape "
            f"{tuple(values.shape)} need {tuple(expected)}. HINT: indices of classes for each "
            "position"
        )
    known = rows_at(target, where, values.groups)
    each = func(values.local, known, reduction="none", **bound)
    parts = {dim - 1: part for dim, part in values.parts.items()}
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
    offset = values.groups.offset({part.axis for part in values.parts.values()})
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
    if any(isinstance(arg, torch.Generator) for arg in (*args, *options.values())):
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
    check_positions(values, what=func.__name__)
    local = values.local
    if not local.numel():  # it would draw nothing, and other ranks do
        func(local.new_ones(*local.shape[:2], *[1] * (local.dim() - 2)), *args, **options)
    result = func(local, *args, **options)
    return values if result is local else values.like(result)
