"""Normalization in data-parallel training: over all ranks, over ghost batches, or over groups.

Batch normalization uses the statistics of a rank's batch, so that a model changes with the number
of ranks. The layers here replace it in place: parameters stay the same objects.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from ..comm.group_device import exchangeable, gather_equal

NORMS = "'local', 'sync', 'ghost:32', 'group:8'"


class Exchange(Protocol):
    """How ranks combine what a layer computes. All ranks call it in the same order."""

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, stacked: [ranks, *row.shape]."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of the tensors of all ranks."""


class GroupExchange:
    """The exchange of the ranks of a process group; None: of all ranks."""

    def __init__(self, group: Any = None) -> None:
        self.group = group

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        return torch.stack(gather_equal(row, self.group))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        total = exchangeable(tensor.contiguous(), self.group)
        dist.all_reduce(total, group=self.group)
        return total.to(tensor.device)


class GlobalBatchNorm(_BatchNorm):
    """Batch normalization with the mean and variance of the samples of all ranks.

    The result, forward and backward, is that of one process with all samples, on CPUs and GPUs,
    also where ranks have different numbers of samples. All ranks must run the same layers in the
    same order: one exchange in forward, one in backward. In evaluation nothing is exchanged.

    Arguments as for ``torch.nn.BatchNorm2d``; inputs have shape (samples, channels, ...).
    """

    has_global_statistics = True  # for verify
    exchanges_always = False  # also in evaluation, if there are no running statistics
    # Whether this rank's batch has no weight, because it has no more samples than other ranks.
    is_filler: Callable[[], bool] = staticmethod(lambda: False)

    def exchange(self) -> Exchange | None:
        """Return how ranks exchange statistics; None with one rank."""
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        return None if alone else GroupExchange()

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.size(1) != self.num_features:
            raise ValueError(
                f"{type(self).__name__} expects {self.num_features} channels in dimension 1; "
                f"this input has shape {tuple(input.shape)}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        self._check_input_dim(input)
        uses_batch = self.training or (self.exchanges_always and not self.track_running_stats)
        exchange = self.exchange() if uses_batch else None
        if exchange is None:
            return super().forward(input)
        apply: Any = GlobalStatistics.apply
        output, mean, variance, samples = apply(
            *(input, self.weight, self.bias, self.eps, exchange, not self.is_filler())
        )
        if self.training and self.track_running_stats:
            with torch.no_grad():
                unbiased = variance * (samples / (samples - 1))
                factor = next_factor(self)
                pairs: Any = ((self.running_mean, mean), (self.running_var, unbiased))
                for running, new in pairs:
                    running.lerp_(new.to(running.dtype), factor)
        normalized: torch.Tensor = output
        return normalized


class GhostBatchNorm(_BatchNorm):
    """Batch normalization over parts of the batch (Hoffer, Hubara, Soudry 2017, arXiv 1705.08741).

    Args:
        ghost: Number of samples that are normalized together.
        args, options: As for ``torch.nn.BatchNorm2d``.
    """

    def __init__(self, ghost: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ghost = ghost

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        self._check_input_dim(input)
        samples = input.size(0)
        if not self.training or samples == self.ghost:
            return super().forward(input)
        if samples % self.ghost:
            raise ValueError(
                f"norm='ghost:{self.ghost}': a batch of {samples} samples on this rank is not a "
                f"multiple of {self.ghost}. HINT: {_nearest(samples, self.ghost)}, or "
                "drop_last=True for the last batch of an epoch"
            )
        parts = samples // self.ghost
        factor = next_factor(self) if self.track_running_stats else 0.0
        # channels of each part are channels of their own
        shape = (self.ghost, parts * self.num_features, *input.shape[2:])
        split = input.unflatten(0, (parts, self.ghost)).transpose(0, 1).reshape(shape)
        mean, variance, weight, bias = (
            tensor.repeat(parts) if tensor is not None else None
            for tensor in (self.running_mean, self.running_var, self.weight, self.bias)
        )
        how = (True, factor, self.eps)
        done = nn.functional.batch_norm(split, mean, variance, weight, bias, *how)
        with torch.no_grad():
            for running, new in ((self.running_mean, mean), (self.running_var, variance)):
                if running is not None and new is not None:
                    running.copy_(new.view(parts, -1).mean(0))
        back = done.reshape(self.ghost, parts, self.num_features, *input.shape[2:])
        return back.transpose(0, 1).reshape(input.shape)


def next_factor(norm: _BatchNorm) -> float:
    """Count a training batch, and return the weight that it has in the running statistics."""
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    return 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum


def convert_norms(
    model: nn.Module, norm: str, is_filler: Callable[[], bool] = lambda: False
) -> list[str]:
    """Replace the batch normalization layers of a model in place.

    Args:
        model: Optimizers of its parameters stay valid.
        norm: "local" (unchanged), "sync", "ghost:N" (samples) or "group:N" (groups of channels).
        is_filler: Returns whether this rank's batch has no weight.

    Returns:
        Names of the replaced layers.

    Raises:
        ValueError: An unknown norm, no layer to replace, a lazy layer, channels that the groups do
            not divide, or a layer in evaluation that "group:N" would replace.
    """
    kind, number = parse_norm(norm)
    if kind == "local":
        return []
    modules = model.named_modules(remove_duplicate=False)  # a layer may be used twice
    found = {name: layer for name, layer in modules if isinstance(layer, _BatchNorm)}
    if not found:
        raise ValueError(
            f"world.distribute: norm={norm!r}, but the model has no batch normalization. HINT: "
            "norm='local'"
        )
    once = {id(layer): (name, layer) for name, layer in found.items()}
    replacements = {key: _replacement(*of, kind, number) for key, of in once.items()}
    for name, layer in found.items():
        replacement = replacements[id(layer)]
        if isinstance(replacement, GlobalBatchNorm):
            replacement.is_filler = is_filler
        if not name:
            raise ValueError(
                f"world.distribute: the model is a single {type(layer).__name__}, which "
                f"norm={norm!r} can't replace in place. HINT: nn.Sequential(model)"
            )
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, replacement)
    return list(found)


def parse_norm(norm: str) -> tuple[str, int]:
    """Return the kind of normalization and its number (0 without one).

    Raises:
        ValueError: It is unknown.
    """
    kind, has_number, number = str(norm).partition(":")
    if kind in ("local", "sync") and not has_number:
        return kind, 0
    if kind in ("ghost", "group") and number.isdecimal() and int(number) > 0:
        return kind, int(number)
    raise ValueError(
        f"world.distribute: norm must be one of {NORMS}; this is {norm!r}. HINT: norm='sync' "
        "normalizes over the batches of all ranks"
    )


def _replacement(name: str, old: _BatchNorm, kind: str, number: int) -> nn.Module:
    if isinstance(old, _LazyNormBase) and old.has_uninitialized_params():
        raise ValueError(
            f"world.distribute: {name} is a {type(old).__name__} without parameters yet. HINT: run "
            "a forward of the model before world.distribute"
        )
    if kind == "group":
        return _group_norm(name, old, number)
    with torch.device("meta"):  # its tensors are replaced
        how = (old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats)
        new = GlobalBatchNorm(*how) if kind == "sync" else GhostBatchNorm(number, *how)
    new._parameters.update(old._parameters)
    new._buffers.update(old._buffers)
    return new.train(old.training)


def _group_norm(name: str, old: _BatchNorm, groups: int) -> nn.GroupNorm:
    if not old.training:
        raise ValueError(
            f"world.distribute: norm='group:{groups}': {name} is in evaluation, where it uses its "
            "running statistics, which a group norm has not. HINT: model.train(), or norm='local'"
        )
    if old.num_features % groups:
        raise ValueError(
            f"world.distribute: norm='group:{groups}' does not divide the {old.num_features} "
            f"channels of {name}. HINT: {_nearest(old.num_features, groups)}"
        )
    with torch.device("meta"):
        new = nn.GroupNorm(groups, old.num_features, old.eps, old.affine)
    new._parameters.update(old._parameters)
    return new.train(old.training)


def _nearest(whole: int, wanted: int) -> str:
    """Return the divisors of a number that are nearest to the wanted one."""
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    below = max(n for n in divisors if n <= wanted)
    above = min((n for n in divisors if n > wanted), default=below)
    return " or ".join(map(str, dict.fromkeys((below, above))))


class GlobalStatistics(torch.autograd.Function):
    """Normalize with the statistics of all ranks; return output, mean, variance and samples."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        exchange: Exchange,
        counts: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        exact = wide(values)
        mean, variance, samples = _statistics(exact, exchange, counts)
        if samples.device.type == "cpu" and samples <= 1:  # a GPU is not waited for
            raise ValueError(
                "Expected more than 1 value per channel when training; all ranks together have "
                f"{samples:.0f}"
            )
        inverse = torch.rsqrt(variance + eps)
        output = (exact - _along(mean, values)) * _along(inverse, values)
        if weight is not None:
            output = output * _along(weight.to(exact.dtype), values)
        if bias is not None:
            output = output + _along(bias.to(exact.dtype), values)
        ctx.save_for_backward(values, weight, mean, inverse)
        ctx.samples, ctx.exchange, ctx.counts = samples, exchange, counts
        ctx.has_bias = bias is not None
        ctx.mark_non_differentiable(mean, variance, samples)
        return output.to(values.dtype), mean, variance, samples

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        values, weight, mean, inverse = ctx.saved_tensors
        exact, given = wide(grad), wide(values)
        # This rank's part of the parameters' gradients: the optimizer combines those of all ranks.
        of_weight, of_bias = channel_sums(exact, given, mean, inverse)
        of_values = None
        if ctx.needs_input_grad[0]:
            sums = ctx.exchange.sum(torch.stack([of_bias, of_weight])) / ctx.samples
            scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
            if ctx.counts:
                found = given - _along(mean, values)
                found.mul_(_along(-scale * inverse * sums[1], values))
                found.addcmul_(exact, _along(scale, values)).add_(_along(-scale * sums[0], values))
            else:  # the statistics do not depend on this rank's samples
                found = exact * _along(scale, values)
            of_values = found.to(values.dtype)
        return (
            of_values,
            of_weight.to(weight.dtype) if weight is not None else None,
            of_bias.to(grad.dtype if weight is None else weight.dtype) if ctx.has_bias else None,
            *(None, None, None),
        )


def channel_sums(
    grad: torch.Tensor, values: torch.Tensor, mean: torch.Tensor, inverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of gradient times normalized value, and of gradients, of each channel."""
    if not values.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    statistics = (mean, inverse.square().reciprocal(), mean, inverse)
    # as in evaluation, where the statistics are constants: one pass over both tensors
    _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
        grad, values, torch.ones_like(mean), *statistics, False, 0.0, [False, True, True]
    )
    return of_weight, of_bias


def _statistics(
    values: torch.Tensor, exchange: Exchange, counts: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean and biased variance of each channel over all ranks, and the number of values.

    They follow from each rank's mean and sum of squared deviations, which loses no digits where the
    mean is large.
    """
    others = _others(values)
    number = values.numel() // values.size(1) if counts else 0
    mean = values.mean(others) if number else values.new_zeros(values.size(1))
    deviations = (values - _along(mean, values)).square().sum(others) * bool(number)
    row = torch.stack([mean, deviations, torch.full_like(mean, number)])
    means, squares, numbers = exchange.gather(row).double().unbind(1)
    total = numbers.sum(0)
    whole = (means * numbers).sum(0) / total
    variance = (squares + numbers * (means - whole).square()).sum(0) / total
    return whole.to(values.dtype), variance.to(values.dtype), total[0].to(values.dtype)


def _others(values: torch.Tensor) -> list[int]:
    """Return all dims but that of channels."""
    return [0, *range(2, values.dim())]


def _along(channels: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a vector with a value for each channel in the shape in which it broadcasts."""
    return channels.view(1, -1, *[1] * (values.dim() - 2))


def wide(values: torch.Tensor) -> torch.Tensor:
    """Return 16-bit values as float32, in which sums are exact enough."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
