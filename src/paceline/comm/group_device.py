"""Tensors on a device that a process group can exchange."""

from typing import Any

import torch
import torch.distributed as dist

# collectives of all ranks' tensors in one: names of PyTorch 2.13 and of earlier ones
all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


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


def device_of(group: Any) -> torch.device:
    """Return the device of tensors that a group exchanges: the CPU, unless it is for GPUs only."""
    return exchangeable(torch.empty(0), group).device


def gather_equal(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Return the tensors of all ranks, which have the same shape. Collective."""
    sent = exchangeable(tensor.contiguous(), group)
    found = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, sent, group=group)
    return [gathered.to(tensor.device) for gathered in found]
