"""What a block that runs its forward twice keeps: buffers, and outputs that cost much."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class ReplayedBuffers:
    """The buffers of a block before its forward, for the forward in backward."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [
            (buffer, buffer.detach().clone()) for buffer in module.buffers() if module.training
        ]

    def forget_unchanged(self) -> None:
        """Free the copies of buffers that the forward has not changed.

        Those of a GPU stay: a comparison would wait for the device in each forward of each block.
        (Batch norm changes its statistics without a new version of the tensor.)
        """
        self._before = [
            (buffer, before)
            for buffer, before in self._before
            if buffer.device.type != "cpu" or not torch.equal(buffer, before)
        ]

    @contextlib.contextmanager
    def second_forward(self) -> Iterator[None]:
        now = [(buffer, buffer.detach().clone()) for buffer, _ in self._before]
        _set_values(self._before)
        try:
            yield
        finally:
            _set_values(now)


def _set_values(values: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for buffer, value in values:
        # Backward may have saved the buffer, and checks that its version is the same.
        with torch.no_grad(), torch.autograd.grad_mode._unsafe_preserve_version_counter(buffer):
            buffer.copy_(value)


# operators whose outputs selective recomputation keeps: they cost much for their bytes
PRODUCTS = {
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn_rnn_layer"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    )
}


def is_product(operator: Any, args: Any, options: Any) -> bool:
    """Return whether selective recomputation keeps the output of an operator."""
    schema = getattr(operator, "_schema", None)
    if schema is None or schema.name not in PRODUCTS:
        return False
    # An attention with dropout draws random numbers: without it, later ones would differ.
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
    return not ({**named, **options}.get("dropout_p") or 0.0)


def works_in_place(module: nn.Module) -> bool:
    """Return whether a module may change a kept product (``nn.ReLU(inplace=True)``)."""
    return any(getattr(part, "inplace", False) for part in module.modules())
