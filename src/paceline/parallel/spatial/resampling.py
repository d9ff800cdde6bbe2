"""Interpolation, and adaptive pooling."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - PyTorch's name

from .exchange import sum_over
from .partition import Partition
from .split_tensor import SplitTensor, refused, rule_for
from .windows import check_positions, empty_result, gather_rows, local_shape, whole_shape

_LINEAR = ("linear", "bilinear", "trilinear")
_CUBIC_A = -0.75


@rule_for(F.interpolate)
def interpolate(
    func: Any,
    values: SplitTensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """Resample with PyTorch's positions and weights; each divided dim by itself."""
    if mode == "area":
        return adaptive_average(F.adaptive_avg_pool2d, values, _target(values, size, scale_factor))
    if antialias:
        raise refused("antialias=True for a tensor", "antialias=False, or .whole() first")
    given = (size, scale_factor, mode, align_corners, recompute_scale_factor)
    shape = whole_shape(func, values, *given)
    check_positions(values, 2)
    count = values.dim() - 2
    factors = [None] * count
    if scale_factor is not None and not recompute_scale_factor:
        is_number = isinstance(scale_factor, (int, float))
        factors = [scale_factor] * count if is_number else list(scale_factor)
    local, parts = values.local, dict(values.parts)
    for dim, partition in values.parts.items():
        new = partition.scaled(shape[dim])
        factor = factors[dim - 2]
        local = _resampled(values, local, dim, new, mode, bool(align_corners), factor)
        parts[dim] = new
    others = [dim for dim in range(2, values.dim()) if dim not in values.parts]
    wanted = local_shape(values, shape, parts)
    if 0 in wanted:
        return values.like(empty_result([local], wanted), parts)
    if any(shape[dim] != values.size(dim) for dim in others):
        if scale_factor is not None and not recompute_scale_factor:
            rest: dict[str, Any] = {
                "scale_factor": tuple(
                    1.0 if i + 2 in parts else float(factors[i] or 1.0) for i in range(count)
                )
            }
        else:
            rest = {
                "size": [local.size(i) if i in parts else shape[i] for i in range(2, 2 + count)]
            }
        local = F.interpolate(local, **rest, mode=mode, align_corners=align_corners)
    return values.like(local, parts)


def _target(values: SplitTensor, size: Any, scale_factor: Any) -> tuple[int, ...]:
    count = values.dim() - 2
    if size is not None:
        return (size,) * count if isinstance(size, int) else tuple(size)
    is_number = isinstance(scale_factor, (int, float))
    factors = [scale_factor] * count if is_number else list(scale_factor)
    return tuple(math.floor(n * one) for n, one in zip(values.shape[2:], factors, strict=True))


def _resampled(
    values: SplitTensor,
    local: torch.Tensor,
    dim: int,
    new: Partition,
    mode: str,
    align_corners: bool,
    factor: float | None,
) -> torch.Tensor:
    """Resample along one divided dim: a weighted sum of one, two or four rows."""
    rows, place = values.size(dim), values.groups.lines[new.axis].place
    taps = [_taps(part, rows, new.rows, mode, align_corners, factor, local) for part in new.parts()]
    asked = [
        (min(int(t[0].min()) for t in one), max(int(t[0].max()) for t in one) + 1)
        if one and one[0][0].numel()
        else (0, 0)
        for one in taps
    ]
    fetched = gather_rows(values, local, dim, asked)
    if not taps[place][0][0].numel():
        return fetched
    total: torch.Tensor | None = None
    for index, weight in taps[place]:
        picked = fetched.index_select(dim, (index - asked[place][0]).to(local.device))
        if weight is not None:
            around = [1] * (local.dim() - 1 - dim)
            picked = picked * weight.to(local.device, local.dtype).view(-1, *around)
        total = picked if total is None else total + picked
    assert total is not None
    return total


def _taps(
    part: tuple[int, int],
    rows: int,
    new_rows: int,
    mode: str,
    align_corners: bool,
    factor: float | None,
    like: torch.Tensor,
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the source rows and weights of the rows ``part`` of the result, as PyTorch does."""
    if mode.startswith("nearest"):
        return [(_nearest_rows(rows, new_rows, mode, factor, like.dim())[slice(*part)], None)]
    # PyTorch computes positions in the dtype of the sum
    kind = torch.float64 if like.dtype == torch.float64 else torch.float32
    at = torch.arange(*part, dtype=kind)
    if align_corners:
        scale = torch.tensor((rows - 1) / (new_rows - 1) if new_rows > 1 else 0.0, dtype=kind)
        source = at * scale
    else:
        scale = torch.tensor(1.0 / factor if factor else rows / new_rows, dtype=kind)
        source = (at + 0.5) * scale - 0.5
    if mode in _LINEAR:
        source = source.clamp(min=0)
        low = source.floor().long().clamp(max=rows - 1)
        high = (low + 1).clamp(max=rows - 1)
        share = (source - low).clamp(0, 1)
        return [(low, 1 - share), (high, share)]
    if mode == "bicubic":
        low = source.floor()
        share = source - low
        weights = _cubic(share)
        indices = [(low.long() + step).clamp(0, rows - 1) for step in (-1, 0, 1, 2)]
        return list(zip(indices, weights, strict=True))
    raise refused(f"interpolation with mode={mode!r} of a tensor", "mode='nearest' or 'bilinear'")


def _nearest_rows(
    rows: int, new_rows: int, mode: str, factor: float | None, ndim: int
) -> torch.Tensor:
    """Return the source row of each row as PyTorch chooses it, which depends on the dims."""
    numbers = torch.arange(rows, dtype=torch.float64).view(1, 1, rows, *[1] * (ndim - 3))
    others = ndim - 3
    if factor:
        how: dict[str, Any] = {"scale_factor": (float(factor), *[1.0] * others)}
    else:
        how = {"size": (new_rows, *[1] * others)}
    return F.interpolate(numbers, **how, mode=mode).flatten().long()


def _cubic(share: torch.Tensor) -> list[torch.Tensor]:
    """Return the weights of four rows (Keys 1981, with PyTorch's a = -0.75)."""
    a = _CUBIC_A

    def near(x: torch.Tensor) -> torch.Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: torch.Tensor) -> torch.Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(share + 1), near(share), near(1 - share), far(2 - share)]


_ADAPTIVE = {
    getattr(home, name): count
    for count in (1, 2, 3)
    for home, name in (
        (F, f"adaptive_avg_pool{count}d"),
        (torch if count == 1 else torch._C._nn, f"adaptive_avg_pool{count}d"),
    )
    if hasattr(home, name)
}


@rule_for(*_ADAPTIVE)
def adaptive_average(func: Any, values: SplitTensor, output_size: Any) -> Any:
    """Mean of each bin; the bins of divided dims are on all ranks afterwards."""
    count = _ADAPTIVE[func]
    if isinstance(output_size, tuple) and len(output_size) == values.dim() - 2:
        count = len(output_size)
    lead = values.dim() - count
    check_positions(values, lead)
    wanted = (output_size,) * count if isinstance(output_size, int) else tuple(output_size)
    bins = [values.size(lead + i) if one is None else one for i, one in enumerate(wanted)]
    local = values.local
    others: Sequence[Any] = [
        None if lead + i in values.parts else one for i, one in enumerate(bins)
    ]
    if any(one is not None for one in others):
        sizes = [local.size(lead + i) if one is None else one for i, one in enumerate(others)]
        # a rank without rows keeps its empty dims
        pool = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}[count]
        if all(sizes):
            local = pool(local, tuple(sizes))  # type: ignore[arg-type]
        else:
            shape = [*local.shape[:lead], *sizes]
            local = local.new_zeros(shape) + 0 * local.sum()
    for dim, partition in values.parts.items():
        first, end = values.groups.rows(partition)
        matrix = _bin_weights(bins[dim - lead], partition.rows, first, end).to(local)
        local = torch.movedim(torch.movedim(local, dim, -1) @ matrix.T, -1, dim)
    return sum_over(local, values.groups.over(values.parts, values.parts))


def _bin_weights(bins: int, rows: int, first: int, end: int) -> torch.Tensor:
    """Return the share of this rank's rows in the mean of each bin: [bins, end - first]."""
    weights = torch.zeros(bins, end - first, dtype=torch.float64)
    for number in range(bins):
        low, high = number * rows // bins, -(-(number + 1) * rows // bins)
        a, b = max(low, first), min(high, end)
        if a < b:
            weights[number, a - first : b - first] = 1 / (high - low)
    return weights


@rule_for(
    *(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    torch.adaptive_max_pool1d,
)
def adaptive_maximum(func: Any, values: SplitTensor, *args: Any, **options: Any) -> Any:
    """Gather: among equal maxima PyTorch gives the gradient to the first in the whole bin."""
    return func(values.whole(), *args, **options)
