"""Padding in the inputs of a model: values at the end of samples that are all the same."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...hooks.flop_counter import tensors_in

MAX_ELEMENTS = 1 << 24  # of a tensor that is inspected


def padded_share(inputs: Any) -> tuple[torch.Tensor | None, float]:
    """Return the largest tensor of a module's inputs, and the share of it that is padding.

    Padding is the same value at the end of a sample. Samples are sequences: tokens of shape (batch,
    length), or vectors (batch, length, features). Of other tensors, only what all samples have at
    the end of one of the last two dimensions counts.
    """
    candidates = [one for one in tensors_in(inputs) if _may_be_padded(one)]
    if not candidates:
        return None, 0.0
    tensor = max(candidates, key=torch.Tensor.numel)
    with torch.no_grad(), _disable_current_modes():
        return tensor, max(_shares(tensor))


def _may_be_padded(tensor: torch.Tensor) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    sides = tensor.shape
    return plain and len(sides) in (2, 3, 4) and sides[0] > 1 and tensor.numel() <= MAX_ELEMENTS


def _shares(tensor: torch.Tensor) -> Iterable[float]:
    length = tensor.shape[1]
    same = tensor == tensor[0, -1].flatten()[-1]
    if tensor.dim() == 3 or (tensor.dim() == 2 and not tensor.is_floating_point()):
        by_position = same.flatten(2).all(2) if tensor.dim() == 3 else same
        at_end = by_position.flip(1).cumprod(1).sum(1)
        yield float(at_end[at_end < length].sum()) / same.shape[0] / length
    for axis in range(max(1, tensor.dim() - 2), tensor.dim()):
        common = same.movedim(axis, 0).flatten(1).all(1)
        at_end = common.flip(0).cumprod(0).sum()
        # One constant column may be a feature.
        yield float(at_end) / common.numel() if 1 < at_end < common.numel() else 0.0
