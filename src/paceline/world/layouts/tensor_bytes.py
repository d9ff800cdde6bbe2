"""Bytes of a rank's models and optimizers, for the record at the end of a run."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...parallel.sharded.registry import local_part, trained_parameters


def tensor_bytes(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    layouts: Iterable[str],
    predicted_peak: int | None,
) -> dict[str, Any]:
    """Return the header field ``tensors``.

    Args:
        layouts: The layouts of the models.
        predicted_peak: Bytes; None if no layout was predicted.
    """
    parameters = {p for model in models for p in trained_parameters(model)}
    of_optimizers = [state for o in optimizers for state in o.state.values()]
    states = [s for state in of_optimizers if isinstance(state, dict) for s in state.values()]
    found: dict[str, Any] = {
        "layout": ", ".join(sorted(set(layouts))),
        "parameters": _nbytes(parameters),
        "buffers": _nbytes({b for model in models for b in model.buffers()}),
        "gradients": _nbytes({p for p in parameters if p.requires_grad}),
        "optimizer_states": _nbytes(s for s in states if isinstance(s, torch.Tensor)),
    }
    if predicted_peak is not None:
        found["predicted_peak"] = predicted_peak
    if torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        found["device_peak"] = max(map(torch.cuda.max_memory_allocated, devices))
    return found


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local_part(tensor).nbytes for tensor in tensors)
