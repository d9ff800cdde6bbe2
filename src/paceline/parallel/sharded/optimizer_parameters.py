"""Replace the parameters that an optimizer holds by their shards; the optimizer stays the object.

Schedulers and the script hold the optimizer, so its parameter groups are changed in place. States
that it has already (a training that was loaded before) are sharded as well.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def replace_parameters(optimizer: Optimizer, shards: Mapping[int, torch.Tensor]) -> None:
    """Replace parameters in the optimizer's groups, and shard their states.

    Args:
        shards: By the id of the parameter that an optimizer holds now, the one that it gets.
    """
    for group in optimizer.param_groups:
        group["params"] = [shards.get(id(parameter), parameter) for parameter in group["params"]]
    for parameter in list(optimizer.state):
        shard = shards.get(id(parameter))
        if shard is not None:
            state = optimizer.state.pop(parameter)
            optimizer.state[shard] = {name: _like(value, shard) for name, value in state.items()}


def _like(value: Any, shard: torch.Tensor) -> Any:
    """Return a state of the whole parameter as one of its shard; other states unchanged."""
    is_whole = isinstance(value, torch.Tensor) and value.shape == shard.shape
    if not is_whole or isinstance(value, DTensor) or not isinstance(shard, DTensor):
        return value
    return distribute_tensor(value, shard.device_mesh, shard.placements, src_data_rank=None)
