"""Buffers of a block that runs its forward twice: the second forward must not change them."""

import contextlib
from collections.abc import Iterator

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
