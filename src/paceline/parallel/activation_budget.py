"""The memory that activations may take, where the script gives no budget."""

import os

import torch
from torch import nn

from ..cluster.rank_identity import rank_identity
from ..cluster.topology.local_resources import free_memory
from .sharded.registry import local_part

STATES_PER_PARAMETER = 3  # a gradient and two states of Adam, which the first step allocates
USABLE_SHARE = 0.8  # the rest is for operators' workspace, and for what is outside of the blocks


def available_budget(model: nn.Module, device: torch.device) -> int:
    """Return the bytes that activations may take of this rank's memory, before the first step.

    On a CPU the ranks of a node share what is available there, or in their control group. On a GPU
    it is the device's free memory, and what PyTorch has reserved without using it. Gradients and
    the optimizer's states are subtracted as if none was allocated yet.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    states = STATES_PER_PARAMETER * sum(local_part(p).nbytes for p in trained)
    return max(int(USABLE_SHARE * (_available(device) - states)), 0)


def _available(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    identity = rank_identity(dict(os.environ))
    return free_memory() // (identity.local_size or identity.size)
