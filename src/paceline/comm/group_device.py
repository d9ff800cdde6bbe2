"""Tensors on a device that a process group can exchange."""

from typing import Any

import torch
import torch.distributed as dist


def exchangeable(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Return the tensor itself, or a copy on a device for which the group has a backend.

    A script may have made a group for GPUs only (NCCL), by which numbers of the host are exchanged
    as well.

    Args:
        group: None for the default group.
    """
    group = dist.group.WORLD if group is None else group
    types = [device.type for device in group._device_types]
    if not types or tensor.device.type in types:
        return tensor
    return tensor.to(types[0])  # the current GPU
