"""Distribute a model: the strategies of its layout, one after the other.

To add a layout, write a ``ParallelStrategy`` and list it in STRATEGIES.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..cost.layout import AXIS_WORDS, Layout
from ..optim.whole_norms import note_part
from .deferred import forget_recordings, is_deferred
from .materialization import Materialization
from .mesh import STAGE, Mesh
from .optimizer_check import check_divided
from .pipeline.strategy import Pipeline
from .placement import place_model
from .replicated.data_parallel import DataParallel
from .sharded.replication import broadcast_model
from .sharded.strategy import FullySharded
from .spatial.strategy import SpatialParallel
from .strategy.distributed_model import DistributedModel
from .strategy.parallel_strategy import DistributionRequest, ParallelStrategy
from .tensor.strategy import TensorParallel

# In the order of application, as in torchtitan: tensor or spatial axes, stages of a pipeline, then
# (after recomputation) shards or replicas.
STRATEGIES: list[type[ParallelStrategy]] = [
    TensorParallel,
    SpatialParallel,
    Pipeline,
    DataParallel,
    FullySharded,
]


def kinds_for(layout: Layout) -> list[type[ParallelStrategy]]:
    """Return the strategies that a layout needs, in the order of application.

    Raises:
        ValueError: Nothing divides one of the layout's axes yet.
    """
    found: list[type[ParallelStrategy]] = []
    dividing = [kind for kind in STRATEGIES if kind.divides(layout)]
    for kind in dividing:
        is_done = any(kind.axes <= chosen.axes for chosen in found)
        if not is_done and not any(kind.axes < other.axes for other in dividing):
            found.append(kind)  # else by one that divides more axes
    for axis in layout.divided_axes:
        if not any(axis in kind.axes for kind in found):
            text = str(layout.without_options)
            raise ValueError(
                f"world.distribute: layout={text!r}: {axis} ({AXIS_WORDS[axis]}) is not "
                f"implemented yet. HINT: layout={str(Layout(zero=layout.zero))!r}"
            )
    return found


def strategies_for(request: DistributionRequest) -> list[ParallelStrategy]:
    """Return the strategies of one model.

    Raises:
        ValueError: Nothing divides one of the layout's axes yet, or an option does not fit it.
    """
    return [kind(request) for kind in kinds_for(request.layout)]


def distribute_model(
    model: nn.Module,
    optimizer: Optimizer | None,
    autocast_dtype: torch.dtype | None,
    request: DistributionRequest,
    recompute: Callable[[nn.Module], None] | None = None,
) -> DistributedModel:
    """Return the model on its device, and distributed if there are several ranks. Collective.

    The tensors of a deferred model are computed: whole ones, or this rank's shards.

    Args:
        optimizer: Its parameters are replaced where the layout replaces those of the model.
        recompute: Called with what this rank has of the model, before shards or replicas are made.

    Raises:
        ValueError: The model or optimizer can't be divided.
    """
    strategies = strategies_for(request)
    has_ranks = request.mesh.size > 1
    is_later = has_ranks and len(strategies) == 1 and strategies[0].defers(model)
    if not is_later and is_deferred(model):
        Materialization(model).run()
        forget_recordings()
    for strategy in strategies:
        strategy.check(model, optimizer)
    distributed = DistributedModel(place_model(model, request.device, autocast_dtype))
    if not has_ranks:
        return distributed
    if request.layout.divided_axes:  # before ranks keep parts of it
        assert dist.group.WORLD is not None
        broadcast_model(distributed.module, dist.group.WORLD)
    for strategy in strategies:
        if recompute is not None and "dp" in strategy.axes:
            recompute(distributed.module)
        distributed = strategy.apply(distributed, optimizer)
    if is_later:
        forget_recordings()
    if request.layout.divided_axes:
        note_parts(distributed, request.mesh)
        if optimizer is not None:
            check_divided(distributed, optimizer)
    return distributed


def note_parts(model: DistributedModel, mesh: Mesh) -> None:
    """Let norms of parameters be those of whole ones, for LARS and LAMB.

    It is called on all ranks when the model has been divided.
    """
    for name, parameter in model.parameters().items():
        axes = model.parted_axes(name) - {STAGE}  # a stage has whole tensors
        if axes and model.part_of(name) is not None:
            note_part(parameter, mesh.group(*axes))
