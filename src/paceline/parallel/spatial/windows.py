"""Pooling, padding and interpolation: each rank fetches the rows that its outputs read."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - PyTorch's name

from .exchange import fetch, sum_over
from .partition import Partition, window, windows_of
from .split_tensor import SplitTensor, refused, rule_for

_LINEAR = ("linear", "bilinear", "trilinear")
_CUBIC_A = -0.75
CHANGED_IN_PLACE = "HINT: inplace=False in the layer after it"


def sizes(value: Any, count: int) -> tuple[int, ...]:
    """Return an argument of PyTorch, a number or one for each dim, as one for each dim."""
    if isinstance(value, int):
        return (value,) * count
    given = tuple(value)
    return given * count if len(given) == 1 else given


def whole_shape(func: Any, values: SplitTensor, *args: Any, **options: Any) -> torch.Size:
    """Return the shape of a result for the whole tensor, with PyTorch's own checks."""

    def meta(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            # autocast, which makes dtypes equal, does not reach the device "meta"
            dtype = torch.float32 if one.is_floating_point() else one.dtype
            return torch.empty(one.shape, dtype=dtype, device="meta")
        return one

    with torch.no_grad():
        result = func(meta(values), *map(meta, args), **{k: meta(v) for k, v in options.items()})
    shape: torch.Size = result.shape
    return shape


def gather_rows(
    values: SplitTensor,
    local: torch.Tensor,
    dim: int,
    coordinates: Sequence[tuple[int, int]],
    mode: str = "constant",
) -> torch.Tensor:
    """Return this rank's rows of a divided dim for padded coordinates.

    Args:
        local: The part, which may already have rows of other ranks along other dims.
        coordinates: Of each rank along the axis, the first padded coordinate and the end.
        mode: Of the padding, as for ``torch.nn.functional.pad``.
    """
    partition = values.parts[dim]
    line = values.groups.lines[partition.axis]
    windows = [window(first, end, partition.rows, mode) for first, end in coordinates]
    rows = fetch(local, dim, partition, windows, line)
    order = windows[line.place].order
    if order is not None:
        index = torch.tensor(order, dtype=torch.int64, device=rows.device)
        rows = rows.index_select(dim, index)
    return rows


_NONE = (0, 0, 0)  # no row of the part is in the window


class Windowed:
    """The rows that this rank's part of an output reads.

    Rows of all dims are fetched before any is padded, so that no padding travels. For backward, an
    operation would keep them, a copy of the rank's part with a rim. ``compact`` is a context in
    which it keeps the part itself, which other layers keep as well, and the rim.

    Attributes:
        rows: What the operation computes with, padded after ``pad``.
        borders: Padding of ``rows``: dim, rows before and after; negative numbers cut rows off.
    """

    def __init__(
        self, values: SplitTensor, coordinates: Mapping[int, Sequence[tuple[int, int]]]
    ) -> None:
        self._part = self.rows = values.local
        self.borders: list[tuple[int, int, int]] = []
        self._blocks: dict[int, tuple[int, int, int]] = {}  # start in the part, length, place
        for dim, ranges in coordinates.items():
            rows = values.size(dim)
            if dim not in values.parts:
                before, after = -ranges[0][0], ranges[0][1] - rows
            else:
                own = values.groups.rows(values.parts[dim])
                place = values.groups.lines[values.parts[dim].axis].place
                inside = [(min(max(a, 0), rows), min(max(b, 0), rows)) for a, b in ranges]
                self.rows = gather_rows(values, self.rows, dim, inside)
                border = window(*ranges[place], rows)
                before, after = border.before, border.after
                first, end = inside[place]
                if (first, end) != own:
                    low, high = max(first, own[0]), min(end, own[1])
                    is_any = low < high
                    self._blocks[dim] = (low - own[0], high - low, low - first) if is_any else _NONE
            if before or after:
                self.borders.append((dim, before, after))

    def pad(self, fill: float = 0.0) -> torch.Tensor:
        """Pad the rows, and return them."""
        around = [0, 0] * self.rows.dim()
        for dim, before, after in self.borders:
            from_end = 2 * (self.rows.dim() - 1 - dim)
            around[from_end : from_end + 2] = before, after
            start, length, place = self._blocks.get(dim, (0, self.rows.size(dim), 0))
            cut = max(-before, 0)
            length += min(before, 0) + min(after, 0)
            self._blocks[dim] = (start + cut, length, place + max(before, 0))
        if self.borders:
            self.rows = F.pad(self.rows, around, value=fill)
        return self.rows

    @contextmanager
    def compact(self) -> Iterator[None]:
        """Keep the rank's part and the rim where the operation keeps all rows."""
        if self.rows is self._part or not torch.is_grad_enabled():
            yield
            return
        # autograd keeps the functions, which must not keep the rows
        address, shape = self.rows.data_ptr(), self.rows.shape
        part, rims = self._part, list[_Rim]()
        blocks = [(dim, *block) for dim, block in self._blocks.items()]

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.data_ptr() != address or tensor.shape != shape:
                return tensor
            if not rims:
                rims.append(_Rim(part, tensor.detach(), blocks))
            return rims[0]

        def unpack(kept: Any) -> torch.Tensor:
            return kept.join() if isinstance(kept, _Rim) else kept

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


class _Rim:
    """A tensor as a block of another one and what surrounds it."""

    def __init__(
        self, part: torch.Tensor, rows: torch.Tensor, blocks: Sequence[tuple[int, int, int, int]]
    ) -> None:
        self._part, self._version = part.detach(), part._version
        self._blocks = tuple(blocks)
        self._sides: list[tuple[torch.Tensor, torch.Tensor]] = []
        for dim, _, length, place in reversed(blocks):
            after = place + length
            before = rows.narrow(dim, 0, place).clone()
            self._sides.append((before, rows.narrow(dim, after, rows.size(dim) - after).clone()))
            rows = rows.narrow(dim, place, length)

    def join(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: The block has been changed since, as in PyTorch.
        """
        if self._part._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: the input of a layer over positions. {CHANGED_IN_PLACE}"
            )
        rows = self._part
        for dim, start, length, _ in self._blocks:
            rows = rows.narrow(dim, start, length)
        for (dim, *_), (before, after) in zip(self._blocks, reversed(self._sides), strict=True):
            rows = torch.cat([before, rows, after], dim)
        return rows


def empty_result(inputs: Sequence[torch.Tensor | None], shape: Sequence[int]) -> torch.Tensor:
    """Return the result of a rank without rows, on which gradients of all inputs depend."""
    given = [tensor for tensor in inputs if tensor is not None]
    total = torch.stack([t.sum().to(given[0].dtype) for t in given]).sum()
    return total * given[0].new_zeros(tuple(shape))


def output_parts(values: SplitTensor, shape: Sequence[int]) -> dict[int, Partition]:
    """Return the partitions of a result in which positions keep their dims."""
    return {dim: part.scaled(shape[dim]) for dim, part in values.parts.items()}


def check_positions(
    values: SplitTensor, first: int = 2, what: str = "a layer over positions"
) -> None:
    """Raise ValueError if a dim before the positions is divided."""
    if any(dim < first for dim in values.parts):
        raise refused(f"{what} got samples or channels of a tensor", ".whole() first")


_MAX_POOLS = {
    getattr(home, f"max_pool{count}d"): count for count in (1, 2, 3) for home in (torch, F)
}


@rule_for(*_MAX_POOLS)
def max_pool(
    func: Any,
    values: SplitTensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Maximum of each window."""
    count = _MAX_POOLS[func]
    if return_indices:
        raise refused("the indices of max pooling in a tensor", "return_indices=False")
    lead = values.dim() - count
    check_positions(values, lead)
    stride = kernel_size if stride in (None, (), []) else stride
    shape = whole_shape(func, values, kernel_size, stride, padding, dilation, ceil_mode)
    how = [sizes(given, count) for given in (kernel_size, stride, padding, dilation)]
    is_float = values.is_floating_point()
    lowest = float("-inf") if is_float else torch.iinfo(values.dtype).min
    kernel, stride, _, dilation = how
    result, parts = _pooled(
        values, shape, how, lowest, lambda rows: func(rows, kernel, stride, 0, dilation)
    )
    return values.like(result, parts)


def _pooled(
    values: SplitTensor,
    shape: torch.Size,
    how: Sequence[tuple[int, ...]],
    fill: float,
    compute: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, dict[int, Partition]]:
    """Return what a function of the padded rows computes, and the partitions of the result.

    Args:
        shape: Of the whole result.
        how: Kernel, stride, padding and dilation of each dim.
        fill: Value of the padding.
    """
    lead, parts, ranges = values.dim() - len(how[0]), output_parts(values, shape), {}
    for dim, of_dim in enumerate(zip(*how, strict=True), lead):
        rows = parts[dim].parts() if dim in parts else [(0, shape[dim])]
        ranges[dim] = [windows_of(part, *of_dim) for part in rows]
    read = Windowed(values, ranges)
    wanted = values.groups.local_shape(shape, parts)
    if 0 in wanted[lead:]:
        return empty_result([read.rows], wanted), parts
    padded = read.pad(fill)
    with read.compact():
        return compute(padded), parts


_AVERAGE_POOLS = {
    getattr(torch._C._nn if count > 1 else torch, f"avg_pool{count}d"): count for count in (1, 2, 3)
} | {getattr(F, f"avg_pool{count}d"): count for count in (1, 2, 3)}


@rule_for(*_AVERAGE_POOLS)
def average_pool(
    func: Any,
    values: SplitTensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Mean of each window: sums of the padded rows, divided by PyTorch's number of rows."""
    count = _AVERAGE_POOLS[func]
    lead = values.dim() - count
    check_positions(values, lead)
    stride = kernel_size if stride in (None, (), []) else stride
    last = () if count == 1 else (divisor_override,)
    given = (kernel_size, stride, padding, ceil_mode, count_include_pad, *last)
    shape = whole_shape(func, values, *given)
    kernel, stride, padding = (sizes(arg, count) for arg in (kernel_size, stride, padding))

    def sum_windows(rows: torch.Tensor) -> torch.Tensor:
        if count > 1:
            sums: torch.Tensor = func(rows, kernel, stride, 0, False, True, 1)
            return sums
        flat = rows.unsqueeze(-1)  # in one dim it has no divisor_override
        return F.avg_pool2d(flat, (*kernel, 1), (*stride, 1), divisor_override=1).squeeze(-1)

    how = (kernel, stride, padding, (1,) * count)
    sums, parts = _pooled(values, shape, how, 0.0, sum_windows)
    if divisor_override:
        return values.like(sums / divisor_override, parts)
    for i in range(count):
        dim = lead + i
        first, end = (0, shape[dim])
        if dim in parts:
            first, end = values.groups.rows(parts[dim])
        counts = [
            _rows_of_window(at * stride[i] - padding[i], kernel[i], values.size(dim), padding[i],
                            count_include_pad)
            for at in range(first, end)
        ]  # fmt: skip
        divisor = torch.tensor(counts, dtype=sums.dtype, device=sums.device)
        sums = sums / divisor.view(-1, *[1] * (sums.dim() - 1 - dim))
    return values.like(sums, parts)


def _rows_of_window(start: int, kernel: int, rows: int, padding: int, with_padding: bool) -> int:
    if with_padding:
        return min(start + kernel, rows + padding) - start
    return min(start + kernel, rows) - max(start, 0)


@rule_for(F.pad, torch._C._nn.pad)
def pad(
    func: Any, values: SplitTensor, pad: Sequence[int], mode: str = "constant", value: Any = None
) -> Any:
    """Pad at the borders of the whole sample."""
    shape = whole_shape(func, values, pad, mode, value)
    local, parts, rest, ranges = values.local, dict(values.parts), list(pad), {}
    for i in range(len(pad) // 2):
        dim = values.dim() - 1 - i
        before, after = pad[2 * i], pad[2 * i + 1]
        ranges[dim] = [(-before, values.size(dim) + after)]
        if dim in parts:
            rest[2 * i] = rest[2 * i + 1] = 0
            parts[dim] = parts[dim].padded(before, after)
            ranges[dim] = [(first - before, end - before) for first, end in parts[dim].parts()]
    assert all(shape[dim] == part.rows for dim, part in parts.items())
    if mode == "constant":
        local = Windowed(values, ranges).pad(value or 0.0)
    else:
        for dim in [dim for dim in ranges if dim in parts]:
            local = gather_rows(values, local, dim, ranges[dim], mode)
        if any(rest):  # other modes refuse a rank without rows
            local = func(local, rest, mode) if local.numel() else F.pad(local, rest)
    if local.untyped_storage().data_ptr() == values.local.untyped_storage().data_ptr():
        local = local.clone()  # the model may change it in place
    return values.like(local, parts)


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
    check_positions(values)
    count = values.dim() - 2
    is_scaled = scale_factor is not None and not recompute_scale_factor
    factors = _factors(scale_factor, count) if is_scaled else [None] * count
    local, parts = values.local, dict(values.parts)
    for dim, partition in values.parts.items():
        new = partition.scaled(shape[dim])
        factor = factors[dim - 2]
        local = _resampled(values, local, dim, new, mode, bool(align_corners), factor)
        parts[dim] = new
    others = [dim for dim in range(2, values.dim()) if dim not in values.parts]
    wanted = values.groups.local_shape(shape, parts)
    if 0 in wanted:
        return values.like(empty_result([local], wanted), parts)
    if any(shape[dim] != values.size(dim) for dim in others):
        if is_scaled:
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


def _factors(scale_factor: Any, count: int) -> list[Any]:
    return [scale_factor] * count if isinstance(scale_factor, (int, float)) else list(scale_factor)


def _target(values: SplitTensor, size: Any, scale_factor: Any) -> tuple[int, ...]:
    count = values.dim() - 2
    if size is not None:
        return (size,) * count if isinstance(size, int) else tuple(size)
    factors = _factors(scale_factor, count)
    return tuple(math.floor(n * f) for n, f in zip(values.shape[2:], factors, strict=True))


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
    ranges = [
        (min(int(t[0].min()) for t in of_rank), max(int(t[0].max()) for t in of_rank) + 1)
        if of_rank and of_rank[0][0].numel()
        else (0, 0)
        for of_rank in taps
    ]
    fetched = gather_rows(values, local, dim, ranges)
    if not taps[place][0][0].numel():
        return fetched
    total: torch.Tensor | None = None
    for index, weight in taps[place]:
        picked = fetched.index_select(dim, (index - ranges[place][0]).to(local.device))
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
    bins = [values.size(lead + i) if n is None else n for i, n in enumerate(wanted)]
    local = values.local
    others: Sequence[Any] = [None if lead + i in values.parts else n for i, n in enumerate(bins)]
    if any(n is not None for n in others):
        sizes = [local.size(lead + i) if n is None else n for i, n in enumerate(others)]
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
