"""ZeRO-1 in a pipeline: each replica of a stage keeps the optimizer states of a part of it.

All replicas have all parameters and averaged gradients of their stage. In a step of the optimizer
each of them updates whole parameters of its own, and sends them to the others.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...mesh import DATA, Mesh
from .buckets import buckets


def owners_of(
    sizes: Mapping[str, int], stages_of: Mapping[str, Collection[int]], ranks: int
) -> dict[str, int]:
    """Return the data rank that updates each trained parameter of the whole model.

    It is the same on all stages that hold a parameter. Data ranks get about equal bytes of each
    stage.

    Args:
        sizes: Bytes of each trained parameter.
        stages_of: The stages that hold it.
        ranks: Number of data ranks.
    """
    taken: Counter[tuple[int, int]] = Counter()  # bytes by stage and data rank
    owners = {}
    for name in sorted(sizes, key=lambda one: -sizes[one]):
        stages = stages_of[name]
        owner = min(range(ranks), key=lambda rank: sum(taken[s, rank] for s in stages))
        taken.update({(stage, owner): sizes[name] for stage in stages})
        owners[name] = owner
    return owners


class ShardedStates:
    """The states of an optimizer in parts on the replicas of a stage.

    In its step the optimizer has the parameters that this rank updates; at any other time it has
    all of the stage, so that clipping, scaling and zeroing of gradients see all of them.

    Args:
        parameters: Of this rank's stage, by name.
        owners: Of each trained parameter of the model, the data rank that updates it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        owners: Mapping[str, int],
        mesh: Mesh,
    ) -> None:
        self._mesh, self._group = mesh, mesh.data_group
        self._owners = {name: owners[name] for name in parameters if name in owners}
        own = mesh.place[DATA]
        self._others = {id(parameters[n]) for n, owner in self._owners.items() if owner != own}
        self._parts = [
            [parameters[name] for name, owner in self._owners.items() if owner == rank]
            for rank in range(mesh.data_size)
        ]
        self._whole: list[list[Any]] = []  # of each group, during a step
        for parameter in [p for p in optimizer.state if id(p) in self._others]:
            del optimizer.state[parameter]
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def holds(self, name: str) -> bool:
        """Return whether this rank has the states of a parameter."""
        return self._owners.get(name, self._mesh.place[DATA]) == self._mesh.place[DATA]

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._restore(optimizer)  # after a step that raised an error
        self._whole = [list(group["params"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in self._others]

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._restore(optimizer)
        ranks = self._mesh.ranks_along((DATA,))
        for rank, part in zip(ranks, self._parts, strict=True):
            for bucket in buckets(part):
                flat = torch.cat([p.reshape(-1) for p in bucket])
                dist.broadcast(flat, rank, self._group)
                if rank != self._mesh.rank:
                    pieces = flat.split([p.numel() for p in bucket])
                    for parameter, piece in zip(bucket, pieces, strict=True):
                        parameter.copy_(piece.view_as(parameter))

    def _restore(self, optimizer: Optimizer) -> None:
        for group, params in zip(optimizer.param_groups, self._whole, strict=False):
            group["params"] = params
        self._whole = []
