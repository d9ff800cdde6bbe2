"""Gradients of whole parameters that FSDP2 has not reduced yet."""

from typing import Any

import torch


def whole_gradient(parameter: Any) -> torch.Tensor | None:
    """Return the gradient of an ``FSDPParam`` that no exchange has taken yet; None without one."""
    accumulated: torch.Tensor | None = parameter.unsharded_accumulated_grad
    if accumulated is not None:
        return accumulated
    whole = getattr(parameter, "_unsharded_param", None)
    return None if whole is None else whole.grad
