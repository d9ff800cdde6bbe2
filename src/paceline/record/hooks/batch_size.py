"""Count the samples of a batch."""

from collections.abc import Mapping
from typing import Any

import torch


def samples_in(batch: Any) -> int:
    """Return the number of samples: the first tensor's leading dimension, or a list's length."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else 1
    if isinstance(batch, (list, tuple)):
        if not batch:
            return 1
        first = batch[0]
        inside = isinstance(first, (torch.Tensor, list, tuple, Mapping))
        return samples_in(first) if inside else len(batch)
    return samples_in(list(batch.values())) if isinstance(batch, Mapping) else 1
