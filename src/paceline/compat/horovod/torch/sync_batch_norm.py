"""Batch normalization over the samples of all ranks, on CPUs and GPUs.

The result, forward and backward, is that of one process with all samples, also where ranks have
different numbers of them. Statistics are combined from each rank's mean and sum of squared
deviations, which loses no digits where the mean is large.
"""

from itertools import count
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from .mpi_ops import Sum, allgather, allreduce, size

_numbers = count()


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalization whose mean and variance are those of the samples of all ranks.

    Arguments as for ``torch.nn.BatchNorm2d``; inputs have shape (samples, channels, ...). All ranks
    must run the same layers in the same order. In evaluation, running statistics are used, and
    ranks exchange nothing.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self._name = f"sync_batch_norm.{next(_numbers)}"

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.size(1) != self.num_features:
            raise ValueError(
                f"SyncBatchNorm expects {self.num_features} channels in dimension 1; this input "
                f"has shape {tuple(input.shape)}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        self._check_input_dim(input)
        uses_batch = self.training or not self.track_running_stats
        if not uses_batch or size() == 1:
            return super().forward(input)
        factor = self._next_factor()
        tracked = self.training and self.track_running_stats
        output: torch.Tensor
        output, mean, variance, samples = _GlobalBatchNorm.apply(
            input, self.weight, self.bias, self.eps, self._name
        )
        if tracked:
            with torch.no_grad():
                unbiased = variance * (samples / (samples - 1))
                for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
                    running.lerp_(new.to(running.dtype), factor)
        return output

    def _next_factor(self) -> float:
        """Count the batch, and return the weight that it has in the running statistics."""
        factor = self.momentum or 0.0
        if self.training and self.track_running_stats:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        return factor


class _GlobalBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        name: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        exact = _wide(values)
        mean, variance, samples = _global_statistics(exact, name)
        if samples <= 1:
            raise ValueError(
                "Expected more than 1 value per channel when training; all ranks together have "
                f"{samples:.0f}"
            )
        inverse = torch.rsqrt(variance + eps)
        normal = (exact - _along(mean, values)) * _along(inverse, values)
        output = normal
        if weight is not None:
            output = output * _along(weight.to(exact.dtype), values)
        if bias is not None:
            output = output + _along(bias.to(exact.dtype), values)
        ctx.save_for_backward(values, weight, mean, inverse)
        ctx.samples, ctx.name, ctx.has_bias = samples, name, bias is not None
        ctx.mark_non_differentiable(mean, variance)
        return output.to(values.dtype), mean, variance, samples

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        values, weight, mean, inverse = ctx.saved_tensors
        exact, others = _wide(grad), _others(values)
        normal = (_wide(values) - _along(mean, values)) * _along(inverse, values)
        # This rank's part of the parameters' gradients: the optimizer combines those of all ranks.
        of_bias, of_weight = exact.sum(others), (exact * normal).sum(others)
        of_values = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([of_bias, of_weight])
            sums = allreduce(sums, op=Sum, name=f"{ctx.name}.backward") / ctx.samples
            scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
            of_values = exact - _along(sums[0], values) - normal * _along(sums[1], values)
            of_values = (of_values * _along(scale, values)).to(values.dtype)
        return (
            of_values,
            of_weight.to(weight.dtype) if weight is not None else None,
            of_bias.to(grad.dtype if weight is None else weight.dtype) if ctx.has_bias else None,
            None,
            None,
        )


def _global_statistics(values: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return mean and biased variance of each channel over all ranks, and the number of values."""
    others = _others(values)
    number = values.numel() // values.size(1)
    mean = values.mean(others) if number else values.new_zeros(values.size(1))
    deviations = (values - _along(mean, values)).square().sum(others)
    counts = torch.full_like(mean, number)
    rows = allgather(torch.stack([mean, deviations, counts]).unsqueeze(0), name=f"{name}.forward")
    means, squares, counts = rows.double().unbind(1)
    total = counts.sum(0)
    whole = (means * counts).sum(0) / total
    variance = (squares + counts * (means - whole).square()).sum(0) / total
    return whole.to(values.dtype), variance.to(values.dtype), float(total[0])


def _others(values: torch.Tensor) -> list[int]:
    """Return all dimensions but that of channels."""
    return [0, *range(2, values.dim())]


def _along(channels: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a vector with a value for each channel in the shape in which it broadcasts."""
    return channels.view(1, -1, *[1] * (values.dim() - 2))


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Return 16-bit values as float32, in which sums are exact enough."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
