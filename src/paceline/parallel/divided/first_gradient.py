"""Autograd functions whose backward exchanges parts, and has no gradient itself."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_gradient_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward that raises ValueError where its own gradient is asked for.

    ``ctx.layer`` is the layer that was computing in forward.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise ValueError(
                f"{ctx.layer}: gradients of gradients (create_graph=True) are not implemented for "
                "a tensor whose sample is divided over ranks. HINT: a layout without d, h and w"
            )
        return backward(ctx, *gradients)

    return checked
