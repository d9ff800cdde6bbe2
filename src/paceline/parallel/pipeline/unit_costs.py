"""Costs of a model's units: measured time and activations, and predicted memory of the stages.

Each unit runs alone, as if it were a stage, on a copy of its modules, so that the measurement
changes neither the model, nor gradients, hooks or random numbers.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from ...comm.group_device import exchangeable
from ...data.sampling.sample_order import preserve_random_states
from .partition import Partition, Unit, held_by_stages
from .stage_plan import ForwardPlan, plan_forward
from .stage_runner import StageModule, run_backward, run_forward
from .trace import Skeleton, Trace

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
            leaves = [one.detach().clone() for one in received]
            kept = _Kept()
            wait = _waiting_for(skeleton.device)
            with kept if repeat == 0 else torch.enable_grad():
                start = time.perf_counter()
                held = run_forward(stage, plan, number, inputs, leaves, lambda _: None)
                ends = held.sent if held.outputs is None else tree_leaves(held.outputs)
                ends = [t for t in ends if torch.is_tensor(t) and t.requires_grad]
                sent = [one.detach() for one in held.sent]
                held.sent = ends
                run_backward(held, [torch.ones_like(one) for one in ends])
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
