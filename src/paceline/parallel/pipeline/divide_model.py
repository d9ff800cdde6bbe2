"""Cut a model into stages, and leave one on this rank."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ...cost.layout import Layout
from ...plurals import counted
from ..mesh import STAGE
from ..strategy.distributed_model import DistributedModel
from ..strategy.parallel_strategy import DistributionRequest
from .atoms import Atoms, tensor_names, tensors_by_name
from .partition import Partition, divide, units_of_modules, units_of_trace
from .pipeline_model import PipelineModel
from .schedules import DEFAULT, MICRO_BATCHES_OF_STAGE, chunks_of, idle_share
from .trace import Skeleton


def divide_model(
    model: DistributedModel, optimizer: Optimizer | None, request: DistributionRequest
) -> PipelineModel:
    """Return this rank's stage of a model, which all ranks have as a whole. Collective.

    Raises:
        ValueError: The model can't be cut into as many stages.
    """
    module, mesh = model.module, request.mesh
    stages = mesh.shape[STAGE]
    skeleton = Skeleton(module, Atoms.of(module), request.device)
    partition = _partition(module, skeleton, request, stages)
    for line in _lines(module, request, stages, partition):
        request.say(line)
    rank = mesh.place[STAGE]
    keep_tensors(
        module, {n for n, of in partition.held.items() if any(v % stages == rank for v in of)}
    )
    if optimizer is not None:
        keep_parameters(optimizer, module)
    has_example = request.example_inputs is not None
    return PipelineModel(
        *(module, model, mesh, request.layout, partition, skeleton, has_example, request.say)
    )


def _partition(
    module: nn.Module, skeleton: Skeleton, request: DistributionRequest, stages: int
) -> Partition:
    example, layout = request.example_inputs, request.layout
    begins: Any = request.options.get("balance")
    begins = [begins] if isinstance(begins, str) else begins
    try:
        if example is None:
            units = units_of_modules(module, skeleton.atoms)
        else:
            units = units_of_trace(skeleton.trace(module, _as_step_inputs(example)), module)
        virtual = stages * chunks_of(layout.schedule or DEFAULT)
        return divide(units, virtual, list(tensors_by_name(module)), begins)
    except ValueError as error:
        text = str(layout.without_options)
        raise ValueError(f"world.distribute: layout={text!r}: {error}") from None


def _as_step_inputs(example: Any) -> Any:
    """Return example inputs as ``TrainingStep`` has them: a list is a tuple of arguments."""
    if isinstance(example, (torch.Tensor, tuple, Mapping)):
        return example
    return tuple(example) if isinstance(example, list) else (example,)


def _lines(
    module: nn.Module, request: DistributionRequest, stages: int, partition: Partition
) -> list[str]:
    """Return lines about the division, and about what differs from one process."""
    layout: Layout = request.layout
    schedule = layout.schedule or DEFAULT
    count = layout.micro_batches or MICRO_BATCHES_OF_STAGE * stages
    of = "operations" if request.example_inputs is not None else "parameters' bytes"
    lines = [
        f"pipeline: {partition} of the {of}; {schedule}, "
        f"{counted(count, 'micro-batch', 'micro-batches')}, "
        f"{idle_share(schedule, stages, count):.0%} idle by the formula"
    ]
    norms = [name for name, one in module.named_modules() if isinstance(one, _BatchNorm)]
    if norms:
        more = f" and {counted(len(norms) - 1, 'other')}" if len(norms) > 1 else ""
        lines.append(
            f"pipeline: batch normalization ({norms[0]}{more}) normalizes each micro-batch; "
            "running statistics are those of the whole batch"
        )
    return lines


def keep_tensors(model: nn.Module, kept: Collection[str]) -> None:
    """Remove the parameters and buffers that are not kept, under all their names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for full, name in tensor_names(model).items():
        if name in kept:
            continue
        owner, _, key = full.rpartition(".")
        module = modules[owner]
        module._parameters.pop(key, None)
        module._buffers.pop(key, None)


def keep_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """Let an optimizer train the model's parameters only, with the states that they have."""
    own = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in own:
                optimizer.state.pop(parameter, None)
        group["params"] = [p for p in group["params"] if id(p) in own]
