"""A number in a tensor, read without waiting for the device."""

from typing import Any

import torch


class PendingValue:
    """A tensor of one element that is being copied to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._event = tensor.detach(), None
        if tensor.device.type == "cuda":
            self._host = torch.empty((), dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach().reshape(()), non_blocking=True)
            event: Any = torch.cuda.Event()
            event.record()
            self._event = event
        elif tensor.device.type == "cpu":
            self._host = self._host.clone()  # the script may change it in place

    @property
    def is_known(self) -> bool:
        """Whether the value can be read without waiting."""
        return self._event is None or bool(self._event.query())

    def read(self) -> float | int:
        """Return the value; waits for it if necessary."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.item()
