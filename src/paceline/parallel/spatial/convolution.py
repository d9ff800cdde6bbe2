"""Convolutions: each rank fetches the rows that its outputs read, and returns their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - PyTorch's name

from .exchange import Fetch, first_gradient_only
from .partition import window, windows_of
from .split_tensor import SplitTensor, refused, rule_for
from .windows import (
    CHANGED_IN_PLACE,
    Windowed,
    check_positions,
    empty_result,
    gather_rows,
    output_parts,
    sizes,
    whole_shape,
)

MAX_COPIED = 20_480  # PyTorch's limit
MIN_PRODUCTS = 1 << 20  # multiplications, below which the copies of the halves take longer
DTYPES = (torch.float32,)  # of which oneDNN has convolutions, and PyTorch avoids some


@dataclass(frozen=True)
class Geometry:
    """Arguments of a convolution.

    Attributes:
        function: torch.conv1d, conv2d or conv3d, or that of torch.nn.functional.
        stride, padding, dilation: One number for each dim of positions; padding with zeros.
        groups: Groups of channels.
    """

    function: Any
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def convolve(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the convolution, without a gradient."""
        halves = _Halves.of(self, rows, weight)
        if halves is None:
            padding = self.padding
            found: torch.Tensor = self.function(
                rows, weight, bias, self.stride, padding, self.dilation, self.groups
            )
            return found
        both = halves.stack(rows)
        return halves.join(
            self.function(both, weight, bias, self.stride, halves.padding, self.dilation)
        )

    def gradients(
        self,
        gradient: torch.Tensor,
        rows: torch.Tensor,
        weight: torch.Tensor,
        has_bias: bool,
        mask: Sequence[bool],
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of rows, weight and bias; None where ``mask`` is false."""
        if rows.dim() < weight.dim():  # a sample without a batch dim
            of_rows, *others = self.gradients(gradient[None], rows[None], weight, has_bias, mask)
            return None if of_rows is None else of_rows[0], *others
        is_of_image = mask[0] and rows.size(1) == 1  # for which oneDNN takes longer
        halves = None if is_of_image else _Halves.of(self, rows, weight)
        padding = self.padding
        if halves is not None:
            gradient, rows, padding = halves.cut(gradient), halves.stack(rows), halves.padding
        none = [0] * len(padding)
        found: list[torch.Tensor | None] = list(
            torch.ops.aten.convolution_backward(
                gradient, rows, weight, [weight.size(0)] if has_bias else None, self.stride,
                padding, self.dilation, False, none, self.groups, list(mask),
            )
        )  # fmt: skip
        if halves is not None and found[0] is not None:
            found[0] = halves.unstack(found[0])
        return tuple(found)


@dataclass(frozen=True)
class _Halves:
    """The halves of the output of one volume along one dim, computed as a batch of two.

    For float32 on CPUs, PyTorch gives a 3-D convolution to oneDNN if the batch has several samples,
    or if samples x channels x depth x height are more than 20,480 (``use_mkldnn`` in
    aten/src/ATen/native/Convolution.cpp). Otherwise it copies each window of the input, which takes
    several times as long. A volume may be above this limit, and a rank's part of it below.

    Attributes:
        dim: The dim.
        rows: Rows of the input.
        outputs: Rows of the output.
        stride: Along the dim.
        reach: Rows that an output reads, less one.
        before: Padding at each side of the dim.
        padding: Of the convolution of the halves.
    """

    dim: int
    rows: int
    outputs: int
    stride: int
    reach: int
    before: int
    padding: tuple[int, ...]

    @classmethod
    def of(cls, geometry: Geometry, rows: torch.Tensor, weight: torch.Tensor) -> "_Halves | None":
        """Return the halves of a convolution; None where PyTorch chooses oneDNN, or is as fast."""
        if (
            rows.dim() != 5
            or rows.size(0) != 1
            or rows.dtype not in DTYPES
            or rows.device.type != "cpu"
            or geometry.groups != 1
            or rows.shape[1:4].numel() > MAX_COPIED
            or weight.shape[2:].numel() == 1  # no copies
            or (weight.size(-1) > 3 and weight.size(-2) > 3)
            or not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)
        ):
            return None
        reach = [d * (k - 1) for d, k in zip(geometry.dilation, weight.shape[2:], strict=True)]
        outputs = [
            (n + 2 * p - r - 1) // s + 1
            for n, p, r, s in zip(
                rows.shape[2:], geometry.padding, reach, geometry.stride, strict=True
            )
        ]
        i = max(range(3), key=lambda at: outputs[at])
        products = weight.numel() * outputs[0] * outputs[1] * outputs[2]
        if min(outputs) < 1 or outputs[i] < 2 or products < MIN_PRODUCTS:
            return None
        rest = tuple(0 if at == i else n for at, n in enumerate(geometry.padding))
        return cls(
            *(i + 2, rows.size(i + 2), outputs[i], geometry.stride[i], reach[i]),
            *(geometry.padding[i], rest),
        )

    @property
    def half(self) -> int:
        """Rows of each half of the output; if the number is odd, both have the middle one."""
        return (self.outputs + 1) // 2

    def _pieces(self) -> list[tuple[int, int, int]]:
        """Return of each half its first row of the input, their number, and their place in it."""
        span = (self.half - 1) * self.stride + self.reach + 1
        found = []
        for first_output in (0, self.outputs - self.half):
            first = first_output * self.stride - self.before
            low, high = max(first, 0), min(first + span, self.rows)
            if low < high:
                found.append((low, high - low, low - first))
            else:  # only padding
                found.append((0, 0, 0))
        return found

    def stack(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what the halves read, with the padding of the dim."""
        shape = list(rows.shape)
        shape[0], shape[self.dim] = 2, (self.half - 1) * self.stride + self.reach + 1
        both = rows.new_empty(shape) if not self.before else rows.new_zeros(shape)
        for half, (low, count, place) in zip(both, self._pieces(), strict=True):
            half.narrow(self.dim - 1, place, count).copy_(rows[0].narrow(self.dim - 1, low, count))
        return both

    def unstack(self, both: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the rows from that of ``stack``."""
        shape = list(both.shape)
        shape[0], shape[self.dim] = 1, self.rows
        total = both.new_zeros(shape)
        for half, (low, count, place) in zip(both, self._pieces(), strict=True):
            total[0].narrow(self.dim - 1, low, count).add_(half.narrow(self.dim - 1, place, count))
        return total

    def join(self, both: torch.Tensor) -> torch.Tensor:
        """Return the output from its halves."""
        overlap = 2 * self.half - self.outputs
        second = both[1:].narrow(self.dim, overlap, self.half - overlap)
        return torch.cat([both[:1], second], self.dim)

    def cut(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradients of the halves; a row that both have counts in the first one."""
        shape = list(gradient.shape)
        shape[0], shape[self.dim] = 2, self.half
        both = gradient.new_empty(shape)
        both[0].copy_(gradient[0].narrow(self.dim - 1, 0, self.half))
        both[1].copy_(gradient[0].narrow(self.dim - 1, self.outputs - self.half, self.half))
        both[1].narrow(self.dim - 1, 0, 2 * self.half - self.outputs).zero_()
        return both


MIN_OVERLAPPED = 1 << 26  # multiplications of a rank, from which halos travel while it computes


@rule_for(torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d)
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
    count, lead = _positions(values, weight)
    shape = whole_shape(func, values, weight, bias, stride, padding, dilation, groups)
    stride, dilation = sizes(stride, count), sizes(dilation, count)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        around = [(n // 2, n - n // 2) for n in total]
    else:
        numbers = sizes(0 if padding == "valid" else padding, count)
        around = [(n, n) for n in numbers]
    parts = output_parts(values, shape)
    ranges = {}
    for i, (before, after) in enumerate(around):
        how = (weight.size(i + 2), stride[i], before, dilation[i])
        if lead + i in parts:
            ranges[lead + i] = [windows_of(part, *how) for part in parts[lead + i].parts()]
        elif before != after:  # "same" with an even kernel
            ranges[lead + i] = [(-before, values.size(lead + i) + after)]
    wanted = values.groups.local_shape(shape, parts)
    ranges = dict(sorted(ranges.items(), key=lambda pair: pair[0] in parts))  # divided dims last
    if 0 in wanted[lead:]:
        read = Windowed(values, ranges)
        return values.like(empty_result([read.rows, weight, bias], wanted), parts)
    rest = tuple(0 if lead + i in ranges else n for i, (n, _) in enumerate(around))
    if values.is_complex():  # PyTorch has no backward of a complex convolution as one function
        rows = Windowed(values, ranges).pad()
        return values.like(func(rows, weight, bias, stride, rest, dilation, groups), parts)
    last, coordinates = ranges.popitem()
    read, partition = Windowed(values, ranges), values.parts[last]
    windows = tuple(window(first, end, partition.rows) for first, end in coordinates)
    line = values.groups.lines[partition.axis]
    plan = Fetch(last, partition, windows, line, tuple(read.borders))
    geometry = Geometry(func, stride, rest, dilation, groups)
    apply: Any = _Convolution.apply
    with read.compact():
        result = apply(*_cast(read.rows, weight, bias), plan, geometry)
    return values.like(result, parts)


def _positions(values: Any, weight: Any) -> tuple[int, int]:
    """Return the number of dims of positions, and of those before them.

    Raises:
        ValueError: The kernel is divided, or a dim before the positions.
    """
    if not isinstance(values, SplitTensor) or isinstance(weight, SplitTensor):
        raise refused("a convolution with the kernel from a tensor", ".whole() first")
    count = weight.dim() - 2
    check_positions(values, values.dim() - count)
    return count, values.dim() - count


def _cast(rows: torch.Tensor, *others: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return operands in the dtype of autocast, which does not reach autograd functions."""
    kind = rows.device.type
    if not torch.is_autocast_enabled(kind):
        return rows, *others
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t if t is None or not t.is_floating_point() or t.dtype == torch.float64
        else t.to(dtype)
        for t in (rows, *others)
    )  # fmt: skip


class _Convolution(torch.autograd.Function):
    """A convolution with the exchange of its halos along one dim.

    In forward, outputs that need no halo are computed while halos travel; in backward, the gradient
    of the weight is computed while gradients of halos travel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        plan: Fetch,
        geometry: Geometry,
    ) -> torch.Tensor:
        transfer = plan.start(local)
        inner = None if plan.is_local else _inner_outputs(plan, geometry, local, weight)
        if inner is None:
            received = transfer.wait()
            found = geometry.convolve(plan.assemble(local, received), weight, bias)
        else:
            cuts = (0, *inner, _outputs(plan, geometry, local, weight))
            found_inner = _piece(plan, geometry, local, {}, (weight, bias), *inner)
            received = transfer.wait()
            pieces = [
                found_inner if (a, b) == inner
                else _piece(plan, geometry, local, received, (weight, bias), a, b)
                for a, b in pairwise(cuts) if a < b
            ]  # fmt: skip
            found = torch.cat(pieces, plan.dim)
        ctx.plan, ctx.geometry, ctx.has_bias = plan, geometry, bias is not None
        ctx.layer = plan.name
        ctx.peers = list(received)
        ctx.save_for_backward(local, weight, *received.values())
        return found

    @staticmethod
    @first_gradient_only
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        plan, geometry = ctx.plan, ctx.geometry
        try:
            local, weight, *halos = ctx.saved_tensors
        except RuntimeError as error:
            if "inplace operation" not in str(error):  # such as a second backward
                raise
            raise RuntimeError(f"{error}. {CHANGED_IN_PLACE}") from None
        rows = plan.assemble(local, dict(zip(ctx.peers, halos, strict=True)))
        of_local = of_weight = of_bias = transfer = None
        gradient = gradient.contiguous()
        given = (gradient, rows, weight, ctx.has_bias)
        needs_rows, *needs = ctx.needs_input_grad[:3]
        if needs_rows:
            of_rows, *_ = geometry.gradients(*given, (True, False, False))
            transfer = plan.start_back(of_rows)
        if any(needs):
            _, of_weight, of_bias = geometry.gradients(*given, (False, *needs))
        if transfer is not None:
            of_local = plan.add_back(of_rows, transfer.wait())
        return of_local, of_weight, of_bias, None, None


def _reach(
    plan: Fetch, geometry: Geometry, local: torch.Tensor, weight: torch.Tensor
) -> tuple[int, int]:
    """Return stride and reach (rows that an output reads, less one) along the plan's dim."""
    i = plan.dim - local.dim()  # from the end, as a sample may have no batch dim
    return geometry.stride[i], geometry.dilation[i] * (weight.size(i) - 1)


def _outputs(plan: Fetch, geometry: Geometry, local: torch.Tensor, weight: torch.Tensor) -> int:
    """Return the number of rows of this rank's output."""
    stride, reach = _reach(plan, geometry, local, weight)
    return (plan.length - reach - 1) // stride + 1


def _piece(
    plan: Fetch,
    geometry: Geometry,
    local: torch.Tensor,
    received: dict[int, torch.Tensor],
    parameters: tuple[torch.Tensor, torch.Tensor | None],
    first: int,
    end: int,
) -> torch.Tensor:
    """Return the rows from ``first`` to before ``end`` of this rank's output."""
    stride, reach = _reach(plan, geometry, local, parameters[0])
    rows = plan.assemble(local, received, first * stride, (end - 1) * stride + reach + 1)
    return geometry.convolve(rows, *parameters)


def _inner_outputs(
    plan: Fetch, geometry: Geometry, local: torch.Tensor, weight: torch.Tensor
) -> tuple[int, int] | None:
    """Return the rows of the output that read no halo; None where the layer is too small."""
    stride, reach = _reach(plan, geometry, local, weight)
    outputs = _outputs(plan, geometry, local, weight)
    first, end = plan.own_range
    low, high = -(-first // stride), (end - reach - 1) // stride + 1
    if 2 * (high - low) < outputs:
        return None
    channels = weight.size(1) * geometry.groups
    others = local.numel() // (local.size(plan.dim) * channels)  # positions along other dims
    return (low, high) if weight.numel() * (high - low) * others >= MIN_OVERLAPPED else None


@rule_for(
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
    count, lead = _positions(values, weight)
    given = (weight, bias, stride, padding, output_padding, groups, dilation)
    shape = whole_shape(func, values, *given)
    stride, padding, dilation = (sizes(arg, count) for arg in (stride, padding, dilation))
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
    wanted = values.groups.local_shape(shape, parts)
    if 0 in wanted[lead:] or 0 in local.shape[lead:]:
        result = empty_result([local, weight], wanted)
    else:
        kept = [0 if lead + i in parts else n for i, n in enumerate(padding)]
        more = [0 if lead + i in parts else n for i, n in enumerate(extra)]
        result = func(local, weight, None, stride, tuple(kept), tuple(more), groups, dilation)
        for dim, (skip, (first, end)) in crops.items():
            after = skip + (end - first) - result.size(dim)
            if skip or after:
                result = F.pad(result, [0, 0] * (result.dim() - 1 - dim) + [-skip, after])
    if bias is not None:
        result = result + bias.to(result.dtype).view(-1, *[1] * count)
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
