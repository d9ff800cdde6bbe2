"""Cut a model into stages, and leave one on this rank."""

import copy
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from ...comm.group_device import exchangeable
from ...cost.layout import Layout, chunks_of, idle_share
from ...cost.layout_memory import size_text
from ...data.sampling.sample_order import preserve_random_states
from ...plurals import counted
from ..memory_budget import budget_bytes
from ..mesh import STAGE, TENSOR
from ..strategy.distributed_model import DistributedModel
from ..strategy.parallel_strategy import DistributionRequest, ParallelStrategy
from .atoms import Atoms, tensor_names, tensors_by_name
from .execution.micro_batches import samples_of, split
from .execution.schedules import DEFAULT, MICRO_BATCHES_OF_STAGE
from .partition import (
    MIN_GAIN,
    DoesNotFitError,
    Partition,
    Unit,
    divide,
    divide_at,
    held_by_stages,
    units_of_modules,
    units_of_trace,
)
from .pipeline_model import PipelineModel
from .stage_plan import ForwardPlan, plan_forward
from .stage_runner import StageModule, run_backward, run_forward
from .trace import Skeleton, Trace

# Costs of a model's units: measured time and activations, and predicted memory of the stages.
#
# Each unit runs alone, as if it were a stage, on a copy of its modules, so that the measurement
# changes neither the model, nor gradients, hooks or random numbers.

# of each micro-batch, put together, and an intermediate tensor of the loss
COMPARED_OUTPUTS = 3
LONG_S = 1.0  # of a unit, from which on the first measurement counts
REPEATS = 3  # after one that is not measured; the shortest counts
MIN_SECONDS = 0.02  # of the whole model: a shorter one consists of calls rather than of computing


@dataclass(frozen=True)
class UnitCost:
    """Seconds of forward and backward, and bytes that a forward keeps for its backward."""

    seconds: float
    activations: float


def measure_units(
    model: nn.Module, skeleton: Skeleton, trace: Trace, units: Sequence[Unit], inputs: Any
) -> list[Unit] | None:
    """Return the units with measured costs, means of all ranks. Collective over all ranks.

    Args:
        trace: Of a forward with ``inputs``, of which only shapes and dtypes are used.

    Returns:
        None if they can't be measured: units that share memory, modules that can't be copied or
        whose forward was replaced, inputs that the model does not accept without their values, or
        a model that is too small.
    """
    parts = _parts(units)
    found: list[UnitCost] = []
    if _can_be_copied(model, skeleton):
        try:
            held = held_by_stages(parts, skeleton.by_name)
            plan = plan_forward(trace, held, len(parts), has_example=True)
            with _unchanged_generators(skeleton.device), torch.enable_grad():
                found = _measure(model, skeleton, plan, _without_values(inputs, skeleton.device))
        except Exception:  # of any code of the user's model
            found = []
    return _agreed(parts, found, skeleton.device)


@contextmanager
def _unchanged_generators(device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with preserve_random_states(), torch.random.fork_rng(devices):
        yield


def _agreed(
    parts: Sequence[list[Unit]], found: list[UnitCost], device: torch.device
) -> list[Unit] | None:
    """Return the units with the mean costs of all ranks; None if one could not measure."""
    costs = found or [UnitCost(0.0, 0.0)] * len(parts)
    flat = torch.tensor(
        [float(bool(found)), *(x for c in costs for x in (c.seconds, c.activations))],
        dtype=torch.float64,
        device=device,
    )
    ranks = 1
    if dist.is_initialized():
        flat, ranks = exchangeable(flat, dist.group.WORLD), dist.get_world_size()
        dist.all_reduce(flat)
    measured, *rest = (flat / ranks).tolist()
    if measured < 1 or sum(rest[::2]) < MIN_SECONDS:
        return None
    result = []
    for part, seconds, activations in zip(parts, rest[::2], rest[1::2], strict=True):
        result.append(replace(part[0], cost=seconds, activations=activations))
        result += [replace(unit, cost=0.0) for unit in part[1:]]
    return result


def _parts(units: Sequence[Unit]) -> list[list[Unit]]:
    """Return units that can only be on one stage together as one part."""
    parts: list[list[Unit]] = []
    for unit in units:
        if unit.can_begin or not parts:
            parts.append([])
        parts[-1].append(unit)
    return parts


def _can_be_copied(model: nn.Module, skeleton: Skeleton) -> bool:
    """Return whether a copy of each atom computes with its own parameters."""
    atoms = [model.get_submodule(name) for name in skeleton.atoms.names]
    return not any("forward" in vars(module) for atom in atoms for module in atom.modules())


def _without_values(inputs: Any, device: torch.device) -> Any:
    """Return inputs of the same shapes; zero is a valid index of any embedding."""

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            return torch.randn(tensor.shape, dtype=tensor.dtype, device=device)
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)

    return tree_map_only(torch.Tensor, empty, inputs)


class _Copies:
    """Copies of the modules and parameters of one part, in place of the model's."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: dict[str, nn.Module] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def get_submodule(self, name: str) -> nn.Module:
        if name not in self._modules:
            found = copy.deepcopy(self._model.get_submodule(name))
            for module in found.modules():
                for key, value in vars(module).items():
                    if key.endswith("_hooks"):
                        value.clear()
            self._modules[name] = found
        return self._modules[name]

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            owner, _, key = name.rpartition(".")
            found = getattr(self._model.get_submodule(owner), key)
            own = found.detach().clone()
            self._tensors[name] = own.requires_grad_(found.requires_grad)
        return self._tensors[name]

    def every_tensor(self) -> list[torch.Tensor]:
        modules = self._modules.values()
        of_modules = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        return [*of_modules, *self._tensors.values()]


def _measure(
    model: nn.Module, skeleton: Skeleton, plan: ForwardPlan, inputs: Any
) -> list[UnitCost]:
    costs: list[UnitCost] = []
    received: list[torch.Tensor] = []
    for number in range(len(plan.stages)):
        copies: Any = _Copies(model)
        stage = StageModule(copies, copies.tensor, skeleton.constants)
        seconds, sent = [], []
        for repeat in range(REPEATS + 1):
            leaves = [tensor.detach().clone() for tensor in received]
            kept = _Kept()
            wait = _waiting_for(skeleton.device)
            with kept if repeat == 0 else torch.enable_grad():
                start = time.perf_counter()
                held = run_forward(stage, plan, number, inputs, leaves, lambda _: None)
                ends = held.sent if held.outputs is None else tree_leaves(held.outputs)
                ends = [t for t in ends if torch.is_tensor(t) and t.requires_grad]
                sent = [tensor.detach() for tensor in held.sent]
                held.sent = ends
                run_backward(held, [torch.ones_like(tensor) for tensor in ends])
                wait()
                seconds.append(time.perf_counter() - start)
            if repeat == 0:
                activations = kept.nbytes(copies)
                if seconds[0] > LONG_S:
                    break
        costs.append(UnitCost(min(seconds[1:] or seconds), activations))
        received = sent
    return costs


def _waiting_for(device: torch.device) -> Callable[[], None]:
    if device.type != "cuda":
        return lambda: None
    torch.cuda.synchronize(device)
    return lambda: torch.cuda.synchronize(device)


class _Kept(torch.autograd.graph.saved_tensors_hooks):
    """Context that notes the memory that a forward keeps for its backward."""

    def __init__(self) -> None:
        self._sizes: dict[StorageWeakRef, int] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._sizes[StorageWeakRef(storage)] = storage.nbytes()
        return tensor

    def nbytes(self, model: _Copies) -> int:
        """Return the bytes without those of the parameters and buffers."""
        own = {StorageWeakRef(t.untyped_storage()) for t in model.every_tensor()}
        return sum(size for storage, size in self._sizes.items() if storage not in own)


class StageMemory:
    """The bytes that a stage needs: parameters, gradients, optimizer states and activations.

    Args:
        tensors: Parameters and buffers of the whole model, by name.
        held: Micro-batches whose activations each stage holds at the same time.
        optimizer: None if the script has none.
        shards: Replicas of a stage that hold parts of the optimizer's states.
        has_shards: Whether they hold shards of the parameters as well, beside the whole ones.
        outputs: Bytes of the outputs of a whole batch, which the last stage has.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        held: Sequence[int],
        optimizer: Optimizer | None,
        shards: int = 1,
        has_shards: bool = False,
        outputs: float = 0.0,
    ) -> None:
        self._held, self._outputs = held, outputs
        # of a trained parameter: it, its gradient, its states
        copies = 2 + (_states(optimizer) + has_shards) / shards
        self._nbytes = {
            name: tensor.nbytes * (copies if tensor.requires_grad else 1)
            for name, tensor in tensors.items()
        }

    def of(self, stage: int, units: Sequence[Unit]) -> int:
        """Return the predicted bytes of a stage with these units."""
        names = {name for unit in units for name in unit.tensors}
        needed = self._held[stage] * sum(unit.activations for unit in units)
        if stage == len(self._held) - 1:
            # all outputs are kept where the loss of a batch is compared with its micro-batches'
            needed = max(needed + self._outputs, COMPARED_OUTPUTS * self._outputs)
        return int(sum(self._nbytes[n] for n in names) + needed)

    def of_stages(self, partition: Partition) -> list[int]:
        """Return the predicted bytes of each stage."""
        return [self.of(stage, units) for stage, units in enumerate(partition.units)]


def _states(optimizer: Optimizer | None) -> int:
    """Return how many tensors as large as a parameter an optimizer keeps for it, at most."""
    if optimizer is None:
        return 0
    if isinstance(optimizer, SGD):
        return int(any(group["momentum"] for group in optimizer.param_groups))
    return 2  # of Adam


def held_micro_batches(schedule: str, stages: int, count: int) -> list[int]:
    """Return how many micro-batches each stage holds between their forward and their backward."""
    if schedule == "gpipe":
        return [count] * stages
    return [min(stages - stage, count) for stage in range(stages)]


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
            key=lambda partition: max(memory.of_stages(partition)),
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
    norms = [name for name, child in module.named_modules() if isinstance(child, _BatchNorm)]
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
