"""A future of torch that has its value already."""

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
    return sorted((one for one in devices if one.type != "cpu"), key=str)
