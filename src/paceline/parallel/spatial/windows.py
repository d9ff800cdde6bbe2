"""Convolutions, pooling and padding: each rank fetches the rows that its outputs read."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - PyTorch's name

from .exchange import fetch
from .partition import Partition, window, windows_of
from .split_tensor import SplitTensor, handles, refused


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
            return torch.empty(one.shape, dtype=one.dtype, device="meta")
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
    fill: float = 0.0,
) -> torch.Tensor:
    """Return this rank's rows of a divided dim for padded coordinates.

    Args:
        local: The part, which may already be padded along other dims.
        coordinates: Of each rank along the axis, the first padded coordinate and the end.
        mode: Of the padding, as for ``torch.nn.functional.pad``.
        fill: Value of the padding of mode "constant".
    """
    partition = values.parts[dim]
    line = values.groups.lines[partition.axis]
    windows = [window(first, end, partition.rows, mode) for first, end in coordinates]
    mine = windows[line.place]
    rows = fetch(local, dim, partition, [one.needed for one in windows], line)
    if mine.order is not None:
        index = torch.tensor(mine.order, dtype=torch.int64, device=rows.device)
        rows = rows.index_select(dim, index)
    if mine.before or mine.after:
        around = [0, 0] * (rows.dim() - 1 - dim) + [mine.before, mine.after]
        rows = F.pad(rows, around, value=fill)
    return rows


def windowed(
    values: SplitTensor,
    parts: Mapping[int, Partition],
    kernel: Mapping[int, tuple[int, int, int, int]],
    fill: float = 0.0,
) -> torch.Tensor:
    """Return the rows that this rank's part of the output reads, with all padding of these dims.

    Args:
        parts: Partitions of the output.
        kernel: Of each divided dim: size, stride, padding before, dilation.
    """
    local = values.local
    for dim, how in kernel.items():
        coordinates = [windows_of(part, *how) for part in parts[dim].parts()]
        local = gather_rows(values, local, dim, coordinates, fill=fill)
    return local


def empty_result(inputs: Sequence[torch.Tensor | None], shape: Sequence[int]) -> torch.Tensor:
    """Return the result of a rank without rows, on which gradients of all inputs depend."""
    given = [one for one in inputs if one is not None]
    total = torch.stack([one.sum().to(given[0].dtype) for one in given]).sum()
    return total * given[0].new_zeros(tuple(shape))


def output_parts(values: SplitTensor, shape: Sequence[int]) -> dict[int, Partition]:
    """Return the partitions of a result in which positions keep their dims."""
    return {dim: one.scaled(shape[dim]) for dim, one in values.parts.items()}


def local_shape(
    values: SplitTensor, shape: Sequence[int], parts: Mapping[int, Partition]
) -> list[int]:
    """Return the shape of this rank's part of a result."""
    found = list(shape)
    for dim, one in parts.items():
        first, end = one.part(values.groups.lines[one.axis].place)
        found[dim] = end - first
    return found


def check_positions(values: SplitTensor, first: int) -> None:
    """Raise ValueError if a dim before the positions is divided."""
    if any(dim < first for dim in values.parts):
        raise refused(
            "a layer over positions got samples or channels of a tensor", ".whole() first"
        )


@handles(torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d)
def convolution(
    func: Any,
    values: Any,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Convolve; its padding is zeros at the borders of the whole sample."""
    if not isinstance(values, SplitTensor) or isinstance(weight, SplitTensor):
        raise refused("a convolution with the kernel from a tensor", ".whole() first")
    count = weight.dim() - 2
    lead = values.dim() - count
    check_positions(values, lead)
    shape = whole_shape(func, values, weight, bias, stride, padding, dilation, groups)
    stride, dilation = sizes(stride, count), sizes(dilation, count)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        around = [(one // 2, one - one // 2) for one in total]
    else:
        numbers = sizes(0 if padding == "valid" else padding, count)
        around = [(one, one) for one in numbers]
    parts = output_parts(values, shape)
    how = {
        dim: (weight.size(dim - lead + 2), stride[dim - lead], around[dim - lead][0],
              dilation[dim - lead])
        for dim in parts
    }  # fmt: skip
    local = windowed(values, parts, how)
    wanted = local_shape(values, shape, parts)
    if 0 in wanted[lead:]:
        return values.like(empty_result([local, weight, bias], wanted), parts)
    rest = [0 if lead + i in parts else around[i][0] for i in range(count)]
    for i, (before, after) in enumerate(around):
        if before != after and lead + i not in parts:  # "same" with an even kernel
            local = F.pad(local, [0, 0] * (count - 1 - i) + [0, after - before])
    result = func(local, weight, bias, stride, tuple(rest), dilation, groups)
    return values.like(result, parts)


@handles(
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
    *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
)
def transposed_convolution(
    func: Any,
    values: Any,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """Transposed convolution: a rank reads the rows that reach its rows of the output."""
    if not isinstance(values, SplitTensor) or isinstance(weight, SplitTensor):
        raise refused("a convolution with the kernel from a tensor", ".whole() first")
    count = weight.dim() - 2
    lead = values.dim() - count
    check_positions(values, lead)
    given = (weight, bias, stride, padding, output_padding, groups, dilation)
    shape = whole_shape(func, values, *given)
    stride, padding, dilation = (sizes(one, count) for one in (stride, padding, dilation))
    extra = sizes(output_padding, count)
    parts = output_parts(values, shape)
    local, crops = values.local, {}
    for dim, partition in parts.items():
        i = dim - lead
        reach = dilation[i] * (weight.size(i + 2) - 1)
        rows = values.parts[dim].rows
        sources = [_sources(part, stride[i], padding[i], reach, rows) for part in partition.parts()]
        local = gather_rows(values, local, dim, sources)
        place = values.groups.lines[partition.axis].place
        start = sources[place][0] * stride[i] - padding[i]  # of the local result
        crops[dim] = (partition.bounds[place] - start, partition.part(place))
    wanted = local_shape(values, shape, parts)
    if 0 in wanted[lead:] or 0 in local.shape[lead:]:
        result = empty_result([local, weight], wanted)
    else:
        kept = [0 if lead + i in parts else one for i, one in enumerate(padding)]
        more = [0 if lead + i in parts else one for i, one in enumerate(extra)]
        result = func(local, weight, None, stride, tuple(kept), tuple(more), groups, dilation)
        for dim, (skip, (first, end)) in crops.items():
            after = skip + (end - first) - result.size(dim)
            around = [0, 0] * (result.dim() - 1 - dim) + [-skip, after]
            result = F.pad(result, around)
    if bias is not None:
        result = result + bias.view(-1, *[1] * count)
    return values.like(result, parts)


def _sources(
    part: tuple[int, int], stride: int, padding: int, reach: int, rows: int
) -> tuple[int, int]:
    """Return the rows of the input that reach the rows ``part`` of the output."""
    first, end = part
    if end <= first:
        return 0, 0
    low = max(-(-(first + padding - reach) // stride), 0)
    high = min((end - 1 + padding) // stride + 1, rows)
    return (low, high) if low < high else (0, 0)


_MAX_POOLS: dict[Any, int] = {}
for _count, _names in {
    1: ("max_pool1d",),
    2: ("max_pool2d",),
    3: ("max_pool3d",),
}.items():
    for _name in _names:
        _MAX_POOLS[getattr(torch, _name)] = _count
        _MAX_POOLS[getattr(F, _name)] = _count


@handles(*_MAX_POOLS)
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
    stride = kernel_size if stride is None or stride == () or stride == [] else stride
    shape = whole_shape(func, values, kernel_size, stride, padding, dilation, ceil_mode)
    kernel, stride, padding, dilation = (
        sizes(one, count) for one in (kernel_size, stride, padding, dilation)
    )
    parts = output_parts(values, shape)
    local = values.local
    lowest = float("-inf") if local.is_floating_point() else torch.iinfo(local.dtype).min
    for dim in range(lead, values.dim()):
        i = dim - lead
        how = (kernel[i], stride[i], padding[i], dilation[i])
        local = _window_rows(values, local, dim, shape, parts, how, lowest)
    wanted = local_shape(values, shape, parts)
    if 0 in wanted[lead:]:
        return values.like(empty_result([local], wanted), parts)
    result = func(local, kernel, stride, 0, dilation)
    return values.like(result, parts)


def _window_rows(
    values: SplitTensor,
    local: torch.Tensor,
    dim: int,
    shape: torch.Size,
    parts: Mapping[int, Partition],
    how: tuple[int, int, int, int],
    fill: float,
) -> torch.Tensor:
    """Return the rows that pooling reads along one dim, with its padding."""
    if dim in parts:
        coordinates = [windows_of(part, *how) for part in parts[dim].parts()]
        return gather_rows(values, local, dim, coordinates, fill=fill)
    first, end = windows_of((0, shape[dim]), *how)
    around = [0, 0] * (local.dim() - 1 - dim) + [-first, end - local.size(dim)]
    return F.pad(local, around, value=fill) if any(around) else local


_AVERAGE_POOLS = {
    getattr(torch._C._nn if count > 1 else torch, f"avg_pool{count}d"): count for count in (1, 2, 3)
} | {getattr(F, f"avg_pool{count}d"): count for count in (1, 2, 3)}


@handles(*_AVERAGE_POOLS)
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
    stride = kernel_size if stride is None or stride == () or stride == [] else stride
    last = () if count == 1 else (divisor_override,)
    given = (kernel_size, stride, padding, ceil_mode, count_include_pad, *last)
    shape = whole_shape(func, values, *given)
    kernel, stride, padding = (sizes(one, count) for one in (kernel_size, stride, padding))
    parts = output_parts(values, shape)
    local = values.local
    for dim in range(lead, values.dim()):
        how = (kernel[dim - lead], stride[dim - lead], padding[dim - lead], 1)
        local = _window_rows(values, local, dim, shape, parts, how, 0.0)
    wanted = local_shape(values, shape, parts)
    if 0 in wanted[lead:]:
        return values.like(empty_result([local], wanted), parts)
    if count == 1:  # it has no divisor_override
        sums = F.avg_pool2d(local.unsqueeze(-1), (*kernel, 1), (*stride, 1), divisor_override=1)
        sums = sums.squeeze(-1)
    else:
        sums = func(local, kernel, stride, 0, False, True, 1)
    if divisor_override:
        return values.like(sums / divisor_override, parts)
    for i in range(count):
        dim = lead + i
        first, end = (0, shape[dim])
        if dim in parts:
            first, end = parts[dim].part(values.groups.lines[parts[dim].axis].place)
        rows = values.size(dim)
        counts = [
            _rows_of_window(at * stride[i] - padding[i], kernel[i], rows, padding[i],
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


@handles(F.pad, torch._C._nn.pad)
def pad(
    func: Any, values: SplitTensor, pad: Sequence[int], mode: str = "constant", value: Any = None
) -> Any:
    """Pad at the borders of the whole sample."""
    shape = whole_shape(func, values, pad, mode, value)
    local, parts, rest = values.local, dict(values.parts), list(pad)
    for i in range(len(pad) // 2):
        dim = values.dim() - 1 - i
        if dim not in parts:
            continue
        before, after = pad[2 * i], pad[2 * i + 1]
        rest[2 * i] = rest[2 * i + 1] = 0
        new = parts[dim].padded(before, after)
        coordinates = [(first - before, end - before) for first, end in new.parts()]
        local = gather_rows(values, local, dim, coordinates, mode, value or 0.0)
        parts[dim] = new
    assert all(shape[dim] == one.rows for dim, one in parts.items())
    if any(rest):
        local = func(local, rest, mode, value)
    return values.like(local, parts)
