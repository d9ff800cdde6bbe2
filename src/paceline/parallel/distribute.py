"""Distribute a model in the layout that the script asks for."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..knobs.process import return_freed_memory
from .blocks import nbytes_of
from .data import data_parallel, place_model
from .deferred import forget_recordings, is_deferred
from .materialization import Materialization
from .memory_budget import available_bytes
from .sharded.deferred_shards import plan_shards
from .sharded.layouts import ShardingRequest
from .sharded.model_check import check_sharding

AMPLE_SHARE = 4  # of the whole model's bytes; with less memory, freed blocks are returned at once


def distribute_model(
    model: nn.Module,
    optimizer: Optimizer | None,
    device: torch.device,
    autocast_dtype: torch.dtype | None,
    request: ShardingRequest | None,
    options: dict[str, Any],
) -> nn.Module:
    """Return the model on its device, and distributed if there are several ranks. Collective.

    The tensors of a deferred model are computed: whole ones, or this rank's shards.

    Args:
        optimizer: With a sharded layout, its parameters are replaced by their shards.
        request: The sharded layout; None for data parallel.
        options: Those of DistributedDataParallel, for data parallel.

    Raises:
        ValueError: The model or optimizer can't be sharded.
    """
    has_ranks = dist.is_initialized() and dist.get_world_size() > 1
    plan = plan_shards(model) if request is not None and has_ranks else None
    if plan is None and is_deferred(model):
        Materialization(model).run()
        forget_recordings()
    if request is not None:
        check_sharding(model, optimizer, request)
    placed = place_model(model, device, autocast_dtype)
    if not has_ranks:
        return placed
    if request is None:
        return data_parallel(placed, device, **options)
    from .sharded.fully_sharded import shard_model  # FSDP takes a moment to import

    _save_memory(placed, device)
    sharded = shard_model(placed, optimizer, device, request, plan)
    del plan, placed
    forget_recordings()
    return sharded


def _save_memory(model: nn.Module, device: torch.device) -> None:
    """Return freed memory at once where this rank has little for a model.

    FSDP allocates whole blocks, and between them shards that stay. On a CPU glibc would keep the
    gaps: together up to the size of the whole model, once for parameters and once for gradients.
    """
    if device.type == "cpu" and available_bytes(device) < AMPLE_SHARE * nbytes_of(model):
        return_freed_memory()
