"""Tensors that are copied to the host without waiting for the device, and futures with a value."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def completed_future(value: Any) -> torch.futures.Future[Any]:
    """Return a future with a value, which may contain tensors of a GPU.

    torch accepts tensors of the devices only that the future was made for.
    """
    future: torch.futures.Future[Any] = torch.futures.Future(devices=devices_of(value))
    future.set_result(value)
    return future


def devices_of(value: Any) -> list[int | str | torch.device]:
    """Return the devices of all tensors in a value, without the CPU."""
    devices = {leaf.device for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}
    return sorted((device for device in devices if device.type != "cpu"), key=str)


def is_capturing() -> bool:
    """Return whether the current stream is captured into a CUDA graph.

    Meanwhile events must not be queried or waited for, and a value can't be known: the captured
    work has not run.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class PendingCopy:
    """A tensor that is being copied to the host. Not to be made during a capture."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: Any = None
        tensor = tensor.detach()
        if tensor.device.type == "cuda":
            # of a tensor without data (--show-memory) the copy has none either
            self._host = tensor.new_empty(tensor.shape, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            # the copy is on the stream of the tensor's device, which may not be the current device
            self._event = torch.cuda.current_stream(tensor.device).record_event()
        else:
            self._host = tensor.clone()  # the script may change it in place

    @property
    def is_known(self) -> bool:
        """Whether the values can be read without waiting."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> torch.Tensor:
        """Return the tensor on the host; waits for it if necessary."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class PendingValue(PendingCopy):
    """A tensor of one element that is being copied to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.reshape(()))

    def read(self) -> float | int:
        """Return the value; waits for it if necessary."""
        return self.wait().item()
