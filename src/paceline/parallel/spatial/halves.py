"""Convolutions of one volume on CPUs, in two halves.

For float32 on CPUs, PyTorch gives a 3-D convolution to oneDNN if the batch has several samples, or
if samples x channels x depth x height are more than 20,480 (``use_mkldnn`` in
aten/src/ATen/native/Convolution.cpp). Otherwise it copies each window of the input, which takes
several times as long. A volume may be above this limit, and a rank's part of it below, so that half
of a volume took longer than the whole. The functions here compute such a convolution as a batch of
two, the halves of its output along one dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
    """The halves of an output along one dim, and the rows of the input that they read.

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
        rest = tuple(0 if at == i else one for at, one in enumerate(geometry.padding))
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
        for one, (low, count, place) in zip(both, self._pieces(), strict=True):
            one.narrow(self.dim - 1, place, count).copy_(rows[0].narrow(self.dim - 1, low, count))
        return both

    def unstack(self, both: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the rows from that of ``stack``."""
        shape = list(both.shape)
        shape[0], shape[self.dim] = 1, self.rows
        total = both.new_zeros(shape)
        for one, (low, count, place) in zip(both, self._pieces(), strict=True):
            total[0].narrow(self.dim - 1, low, count).add_(one.narrow(self.dim - 1, place, count))
        return total

    def join(self, both: torch.Tensor) -> torch.Tensor:
        """Return the output from its halves."""
        twice = 2 * self.half - self.outputs
        second = both[1:].narrow(self.dim, twice, self.half - twice)
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
