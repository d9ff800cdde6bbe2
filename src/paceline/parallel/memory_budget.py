"""The memory that one rank may take: the limit of predictions, and of kept activations."""

import os
import re
import resource
from pathlib import Path

import torch
from torch import nn

from ..cluster.rank_identity import rank_identity
from ..cluster.topology.local_resources import free_memory
from ..optim.whole_norms import local_part

GIB = 1 << 30
STATES_PER_PARAMETER = 3  # a gradient and two states of Adam, which the first step allocates
USABLE_SHARE = 0.8  # the rest is for operators' workspace, and for what is outside of the blocks


def budget_bytes(memory_budget: float | None, device: torch.device) -> int:
    """Return the bytes that a rank may take for its training.

    Args:
        memory_budget: In GiB; None for what the device has, or the node for a rank on the CPU.

    Raises:
        ValueError: The budget is not above 0.
    """
    if memory_budget is None:
        return available_bytes(device)
    if not 0 < memory_budget < float("inf"):
        raise ValueError(
            f"world.distribute: memory_budget must be above 0 GiB; this is {memory_budget}. "
            "HINT: memory_budget=4.0"
        )
    return int(memory_budget * GIB)


def available_bytes(device: torch.device, ranks: int | None = None) -> int:
    """Return the bytes that this rank has or may still allocate.

    On a GPU all of it except what other processes and CUDA itself take. On the CPU what this
    process has (without mapped files and the interpreter) and its share of what the node or control
    group has left.

    Args:
        ranks: Number of ranks of this node; None for this job's.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device))
    return max(_status_bytes("RssAnon") - _INTERPRETER_BYTES, 0) + free_bytes(device, ranks)


def activation_bytes(model: nn.Module, device: torch.device) -> int:
    """Return the bytes that activations may take of what is free, before the first step.

    Gradients and the optimizer's states are subtracted as if none was allocated yet.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    states = STATES_PER_PARAMETER * sum(local_part(p).nbytes for p in trained)
    return max(int(USABLE_SHARE * (free_bytes(device) - states)), 0)


def free_bytes(device: torch.device, ranks: int | None = None) -> int:
    """Return the bytes that this rank may still allocate.

    On a GPU its free memory, and what PyTorch has reserved without using it. On the CPU the rank's
    share of what is free on the node or in its control group.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    identity = rank_identity(dict(os.environ))
    free = free_memory() // (ranks or identity.local_size or identity.size)
    for kind, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            free = min(free, limit - _status_bytes(used))
    return max(free, 0)


def _status_bytes(name: str) -> int:
    """Return a size of this process that the kernel reports."""
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


# What the interpreter and its libraries take: this module is imported before models are built.
_INTERPRETER_BYTES = _status_bytes("RssAnon")
