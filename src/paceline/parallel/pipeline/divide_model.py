"""Cut a model into stages, and leave one on this rank."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ...comm.group_device import exchangeable
from ...cost.layout import Layout
from ...cost.layout_memory import size_text
from ...cost.pipeline import chunks_of, idle_share
from ...plurals import counted
from ..memory_budget import budget_bytes
from ..mesh import STAGE, TENSOR
from ..strategy.distributed_model import DistributedModel
from ..strategy.parallel_strategy import DistributionRequest, ParallelStrategy
from .atoms import Atoms, tensor_names, tensors_by_name
from .execution.micro_batches import samples_of, split
from .execution.schedules import DEFAULT, MICRO_BATCHES_OF_STAGE
from .partition import (
    DoesNotFitError,
    Partition,
    Unit,
    divide,
    divide_at,
    units_of_modules,
    units_of_trace,
)
from .pipeline_model import PipelineModel
from .stage_times import MIN_GAIN
from .trace import Skeleton
from .unit_costs import StageMemory, held_micro_batches, measure_units

MAX_SAMPLES = 64  # of example inputs that are computed with
BY_OPERATIONS = "operations"  # a value of the option ``balance``: nothing is measured


def divide_model(
    model: DistributedModel,
    optimizer: Optimizer | None,
    request: DistributionRequest,
    tensor: ParallelStrategy | None = None,
) -> PipelineModel:
    """Return this rank's stage of a model, which all ranks have as a whole. Collective.

    Args:
        tensor: Divides the layers of a stage over the tensor axis; None: it has one rank.

    Raises:
        ValueError: The model can't be cut into as many stages.
    """
    module, mesh = model.module, request.mesh
    stages = mesh.shape[STAGE]
    skeleton = Skeleton(module, Atoms.of(module), request.device)
    division = _divide(module, optimizer, skeleton, request)
    partition = division.partition
    for line in _lines(module, request, stages, division):
        request.say(line)
    rank = mesh.place[STAGE]
    keep_tensors(
        module, {n for n, of in partition.held.items() if any(v % stages == rank for v in of)}
    )
    if optimizer is not None:
        keep_parameters(optimizer, module)
    if tensor is not None:
        model = tensor.apply(model, optimizer)
    return PipelineModel(
        *(module, model, request, partition, skeleton, optimizer),
        predicted_bytes=division.nbytes,
    )


@dataclass(frozen=True)
class _Division:
    """A partition, and what it was made by.

    Attributes:
        cost: What the shares of the stages are of.
        nbytes: Predicted memory of each stage; empty if it is not known.
        problem: A sentence if no division fits in the memory; "" otherwise.
    """

    partition: Partition
    cost: str
    nbytes: Sequence[int] = ()
    problem: str = ""


def _divide(
    module: nn.Module,
    optimizer: Optimizer | None,
    skeleton: Skeleton,
    request: DistributionRequest,
) -> _Division:
    """Return the division of a model. Collective over all ranks."""
    example, layout = request.example_inputs, request.layout
    schedule, stages = layout.schedule or DEFAULT, request.mesh.shape[STAGE]
    given: Any = request.options.get("balance")
    is_measured = example is not None and given is None
    begins = None if given == BY_OPERATIONS else given
    if isinstance(begins, str):
        begins = [name.strip() for name in begins.split(",")]
    tensors = tensors_by_name(module)
    names, virtual = list(tensors), stages * chunks_of(schedule)
    try:
        if example is None:
            units = units_of_modules(module, skeleton.atoms)
            return _Division(divide(units, virtual, names, begins), "parameters' bytes")
        inputs, scale = _few_samples(_as_step_inputs(example))
        trace = skeleton.trace(module, inputs)
        units = units_of_trace(trace, module)
        plain = divide(units, virtual, names, begins)
    except ValueError as error:
        text = str(layout.without_options)
        raise ValueError(f"world.distribute: layout={text!r}: {error}") from None
    measured = measure_units(module, skeleton, trace, units, inputs) if is_measured else None
    if measured is None:
        return _Division(plain, "operations")
    measured = [replace(unit, activations=scale * unit.activations) for unit in measured]
    count = _micro_batches(layout, stages)
    memory = StageMemory(
        tensors,
        held_micro_batches(schedule, stages, count),
        optimizer,
        request.mesh.data_size if layout.zero else 1,
        has_shards=layout.zero > 1 and request.mesh.data_size > 1,
        outputs=scale * count * trace.output_bytes,
    )
    has_memory = virtual == stages and TENSOR not in request.mesh.shape
    return _best_division(measured, plain, names, memory, has_memory, request.device)


def _best_division(
    units: Sequence[Unit],
    plain: Partition,
    names: Sequence[str],
    memory: StageMemory,
    has_memory: bool,
    device: torch.device,
) -> _Division:
    """Return the fastest division by measured times that fits in the memory of all ranks.

    The division by operations is kept where another one gains little: it is the same in each run.

    Args:
        has_memory: Whether the memory of a stage is predicted: it is that of one rank.
    """
    plain = divide_at(units, plain.cuts, names)
    if not has_memory:
        best = divide(units, len(plain.units), names)
        return _Division(_faster(best, plain), "measured time")
    limit, problem = least_budget(device), ""
    try:
        best = divide(units, len(plain.units), names, None, lambda s, of: memory.of(s, of) <= limit)
    except DoesNotFitError as error:
        best = min(
            (divide(units, len(plain.units), names), plain),
            key=lambda one: max(memory.of_stages(one)),
        )
        problem = (
            f"pipeline: {error} of a rank ({size_text(limit)}): the largest stage needs about "
            f"{size_text(max(memory.of_stages(best)))}. HINT: more stages, or smaller micro-batches"
        )
        return _Division(best, "measured time", memory.of_stages(best), problem)
    if max(memory.of_stages(plain)) <= limit:
        best = _faster(best, plain)
    return _Division(best, "measured time", memory.of_stages(best), problem)


def _faster(best: Partition, plain: Partition) -> Partition:
    return best if max(best.shares) < (1 - MIN_GAIN) * max(plain.shares) else plain


def least_budget(device: torch.device) -> int:
    """Return the least memory that a rank of the job has for its training. Collective."""
    least = torch.tensor([budget_bytes(None, device)], dtype=torch.int64)
    if dist.is_initialized():
        least = exchangeable(least, dist.group.WORLD)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least.item())


def _micro_batches(layout: Layout, stages: int) -> int:
    return layout.micro_batches or MICRO_BATCHES_OF_STAGE * stages


def _few_samples(inputs: Any) -> tuple[Any, float]:
    """Return inputs with at most MAX_SAMPLES, and by which factor they were more."""
    try:
        samples = samples_of(inputs)
    except ValueError:  # tensors that are not divided along their first dim
        return inputs, 1.0
    if samples <= MAX_SAMPLES:
        return inputs, 1.0
    return split(inputs, [MAX_SAMPLES, samples - MAX_SAMPLES])[0], samples / MAX_SAMPLES


def _as_step_inputs(example: Any) -> Any:
    """Return example inputs as ``TrainingStep`` has them: a list is a tuple of arguments."""
    if isinstance(example, (torch.Tensor, tuple, Mapping)):
        return example
    return tuple(example) if isinstance(example, list) else (example,)


def _lines(
    module: nn.Module, request: DistributionRequest, stages: int, division: _Division
) -> list[str]:
    """Return lines about the division, and about what differs from one process."""
    layout: Layout = request.layout
    schedule = layout.schedule or DEFAULT
    count = _micro_batches(layout, stages)
    lines = [
        f"pipeline: {division.partition} of the {division.cost}; {schedule}, "
        f"{counted(count, 'micro-batch', 'micro-batches')}, "
        f"{idle_share(schedule, stages, count):.0%} idle by the formula"
    ]
    if division.problem:
        lines.append(division.problem)
    elif division.nbytes:
        each = ", ".join(size_text(size) for size in division.nbytes)
        lines.append(f"pipeline: the stages need about {each} of memory")
    if layout.zero > 1 and request.mesh.data_size > 1:
        lines.append(
            f"pipeline: zero{layout.zero} gathers the parameters of a stage once in a step, and "
            "frees them at its end; gradients are scattered after the last micro-batch"
        )
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
