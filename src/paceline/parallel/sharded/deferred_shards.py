"""Shards of a deferred model: no rank holds more of it than its shards and one tensor.

``fully_shard`` is applied to the model without memory. Each rank then allocates its shards. Rank 0
computes the tensors one by one, with the numbers of an ordinary construction, and broadcasts them.
Every rank copies its part of each.
"""

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ...comm.members.exchange_objects import all_gather_objects
from ...optim.whole_norms import local_part
from ...record.rank_places import placed_ranks
from ..deferred import is_deferred
from ..materialization import DeferredStorage, Finish, Materialization, give_values

if TYPE_CHECKING:  # takes a moment to import
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


def plan_shards(model: nn.Module, group: dist.ProcessGroup | None = None) -> Materialization | None:
    """Return the plan of a model that is deferred on all ranks. Collective.

    None if it is deferred on some ranks only, or on none.

    Raises:
        ValueError: The ranks have different models, or a buffer shares memory with a parameter.
    """
    plan = Materialization(model) if is_deferred(model) else None
    mine = None if plan is None else zlib.crc32(_description(plan).encode())
    found = all_gather_objects(mine, int | None, group)
    if plan is None or None in found:
        return None
    if others := [rank for rank, digest in enumerate(found) if digest != found[0]]:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        raise ValueError(
            f"world.distribute: the {type(model).__name__} of world.deferred() has other tensors "
            f"on {placed_ranks([ranks[i] for i in others])} than on "
            f"{placed_ranks(ranks[:1])}. HINT: build the same model on each rank"
        )
    for storage in plan.storages:
        _check_buffers(storage)
    return plan


def _description(plan: Materialization) -> str:
    """Return names, shapes, dtypes and places of all tensors: what must be equal on all ranks."""
    return repr(
        [
            (storage.nbytes, [(tensor.name, tensor.view[2:]) for tensor in storage.tensors])
            for storage in plan.storages
        ]
    )


def _check_buffers(storage: DeferredStorage) -> None:
    """Raise ValueError for a buffer in the memory of a parameter, which sharding moves."""
    is_parameter = {
        tensor.name: isinstance(tensor.tensor, nn.Parameter) for tensor in storage.tensors
    }
    owner = next((name for name, is_one in is_parameter.items() if is_one), None)
    buffer = next((name for name, is_one in is_parameter.items() if not is_one), None)
    if owner is not None and buffer is not None:
        raise ValueError(
            f"world.distribute: the buffer {buffer} shares memory with the parameter {owner}. "
            "HINT: compute it in forward, or clone it"
        )


def compute_shards(
    plan: Materialization,
    sharded: Mapping[str, "FSDPParam"],
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Allocate the shards of a model, and fill them with rank 0's numbers. Collective.

    Args:
        plan: Made before the model was sharded.
        sharded: The parameters by their names, as ``fully_shard`` has divided them.
        rank: Which of the shards this rank holds.
        device: Device of the collectives, and of buffers.
        group: The ranks that share the model; None: all.
    """
    names = {tensor.name for storage in plan.storages for tensor in storage.tensors}
    for name in names & sharded.keys():  # all first, so that freed tensors leave no gaps between
        _allocate(sharded[name], device)

    def store(number: int, memory: torch.UntypedStorage) -> None:
        for t, values in plan.storages[number].values(memory):
            if t.name in sharded:
                _copy_shard(sharded[t.name], values, rank)
            else:
                give_values(t.tensor, values)

    with torch.no_grad():
        _broadcast(plan, device, store, group)


def _allocate(parameter: "FSDPParam", device: torch.device) -> None:
    """Replace the shard on the device meta by one with memory."""
    on = torch.device("cpu") if parameter.offload_to_cpu else device
    local = torch.empty(parameter.sharded_size, dtype=parameter.sharded_param.dtype, device=on)
    shard = nn.Parameter(
        parameter.to_sharded_dtensor(local),
        requires_grad=parameter.sharded_param.requires_grad,
    )
    parameter._setattr_on_modules(shard)
    parameter.reset_sharded_param()  # pads it, and pins its memory where that was asked for


def _copy_shard(parameter: "FSDPParam", whole: torch.Tensor, rank: int) -> None:
    local = local_part(parameter.sharded_param)
    begin = rank * parameter.padded_sharded_param_size[0]
    if local.numel():
        local.copy_(whole[begin : begin + local.shape[0]])


def _broadcast(
    plan: Materialization, device: torch.device, store: Finish, group: dist.ProcessGroup | None
) -> None:
    """Give the first rank's storages to ``store``, in the order of its computation."""
    if dist.get_rank(group) == 0:

        def send(number: int, memory: torch.UntypedStorage) -> None:
            _send(torch.tensor([number], device=device), group)
            octets = torch.empty(0, dtype=torch.uint8).set_(memory)
            octets = octets[: plan.storages[number].nbytes].to(device)
            _send(octets, group)
            store(number, octets.untyped_storage())

        plan.compute(send)
        return
    # one for all parameters: memory that is allocated for each would leave gaps
    most = max((s.nbytes for s in plan.storages if not _has_buffers(s)), default=0)
    received = torch.empty(most, dtype=torch.uint8, device=device)
    number = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in plan.storages:
        _send(number, group)
        storage = plan.storages[int(number)]
        kept = _has_buffers(storage)  # they stay in this memory
        octets = received.new_empty(storage.nbytes) if kept else received[: storage.nbytes]
        _send(octets, group)
        store(int(number), octets.untyped_storage())


def _has_buffers(storage: DeferredStorage) -> bool:
    return any(not isinstance(tensor.tensor, nn.Parameter) for tensor in storage.tensors)


def _send(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Broadcast a tensor of the first rank, unless it is empty."""
    if tensor.numel():
        dist.broadcast(tensor, group=group, group_src=0)
