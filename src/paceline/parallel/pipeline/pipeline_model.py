"""A model in a pipeline: what the training loop may ask of it, and what the script calls."""

import functools
import hashlib
import inspect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ...comm.group_device import gather_equal
from ...cost.layout import chunks_of
from ..divided.divided_tensor import whole_outputs
from ..mesh import DATA, STAGE, TENSOR
from ..placement import empty_as
from ..replicated.replica import LikePlainModule
from ..sharded.replication import BufferSync
from ..strategy.distributed_model import DistributedModel
from ..strategy.parallel_strategy import DistributionRequest
from ..strategy.training_step import Loss, TrainingStep
from .atoms import tensor_names
from .attributes import mark_kept
from .execution.deferred_norms import DeferredNorms, is_deferred
from .execution.micro_batches import LossComparisons, check_count, samples_of, sizes_of, split
from .execution.schedules import (
    AUTO,
    DEFAULT,
    MICRO_BATCHES_OF_STAGE,
    Candidate,
    ScheduleChoice,
    candidates_for,
)
from .execution.sharded_parameters import (
    ShardedParameters,
    ShardedStates,
    owners_of,
    reduce_gradients,
)
from .executor import Batch, Executor
from .partition import Partition, StageTimes
from .stage_plan import ForwardPlan, plan_forward
from .stage_runner import StageModule, check_hooks
from .trace import Skeleton

MAX_PLANS = 256  # of different shapes and modes; then all are planned again


class PipelinedModule(LikePlainModule):
    """What the script calls: outputs on all ranks in evaluation, an error in training.

    Keys of ``state_dict`` and attributes are those of the plain model, of which each rank has a
    part.
    """

    def __init__(self, module: nn.Module, evaluate: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module = module
        self._evaluate = evaluate
        self.training = module.training

    def forward(self, *args: Any, **options: Any) -> Any:
        if self.training:
            raise ValueError(
                f"the {type(self.module).__name__} is a pipeline, which can't be called in "
                "training. HINT: loss = world.forward_backward(model, inputs, targets, loss=...); "
                "for an evaluation model.eval()"
            )
        if args and options:
            raise ValueError(
                "a pipeline is called with positional or with keyword arguments, not with both. "
                "HINT: model(**inputs)"
            )
        return self._evaluate(options or args)


def _loss_key(loss: Loss) -> Any:
    """Return what tells losses apart; a lambda or a partial in a loop is the same one each time."""
    if isinstance(loss, functools.partial):
        return _loss_key(loss.func), _simple({**dict(enumerate(loss.args)), **loss.keywords})
    code = getattr(loss, "__code__", None)
    if code is None:
        return loss if isinstance(loss, Hashable) else id(loss)
    function: Any = loss
    options = {"defaults": function.__defaults__, **(function.__kwdefaults__ or {})}
    return code, _simple({**inspect.getclosurevars(loss).nonlocals, **options})


def _simple(values: Mapping[Any, Any]) -> str:
    """Return the values that can be compared, as text."""
    kinds = (bool, int, float, str, tuple, type(None))
    return repr({key: value for key, value in values.items() if isinstance(value, kinds)})


class PipelineModel(DistributedModel):
    """A model whose stages are on the ranks of the axis ``stage``, with replicas along ``data``.

    Attributes:
        predicted_bytes: Memory that each stage needs; empty if it is not predicted.
        states: The optimizer's states in parts on the replicas (ZeRO-1); None: all on each.
        sharded: Parameters and gradients in shards on them, too (ZeRO-2 and 3); None: all on each.
    """

    def __init__(
        self,
        module: nn.Module,
        inner: DistributedModel,
        request: DistributionRequest,
        partition: Partition,
        skeleton: Skeleton,
        optimizer: Optimizer | None = None,
        predicted_bytes: Sequence[int] = (),
    ) -> None:
        super().__init__(module, inner)
        mesh, layout, say = request.mesh, request.layout, request.say
        self.mesh, self.partition, self.skeleton = mesh, partition, skeleton
        self.schedule = layout.schedule or DEFAULT
        self.micro_batches = layout.micro_batches
        self.predicted_bytes = predicted_bytes
        self._has_example, self._say = request.example_inputs is not None, say
        self._called = PipelinedModule(module, self._evaluate)
        self._aliases = tensor_names(skeleton.model)
        self._plans: dict[Any, ForwardPlan] = {}
        self._weighted: dict[Any, bool] = {}
        self._comparisons = LossComparisons()
        self._balance: StageTimes | None = None  # from the first step with the chosen schedule on
        self._note = request.note
        self._choice: ScheduleChoice | None = None
        self._can_split = layout.recompute is None and TENSOR not in mesh.shape
        self._samples = 0  # of the last batch
        self._syncs = self._is_first_step = True
        self._stages = mesh.shape[STAGE]
        self.states: ShardedStates | None = None
        self.sharded: ShardedParameters | None = None
        if layout.zero > 1 and mesh.data_size > 1:
            self.sharded = ShardedParameters(module, optimizer, mesh, skeleton.device)
        elif layout.zero and mesh.data_size > 1 and optimizer is not None:
            self.states = self._shard_states(optimizer)
        self._tie_groups = self._create_tie_groups()
        self._buffers = BufferSync(module, mesh.data_group)
        whole = whole_outputs if TENSOR in mesh.shape else lambda nest: nest
        stage = StageModule(module, self._tensor, skeleton.constants, whole)
        self._executor = Executor(mesh, stage, DeferredNorms(module), skeleton.device)

    def _shard_states(self, optimizer: Optimizer) -> ShardedStates:
        trained = self.skeleton.model.named_parameters()
        sizes = {name: p.nbytes for name, p in trained if p.requires_grad}
        stages = {name: self._ranks_of(name) for name in sizes}
        owners = owners_of(sizes, stages, self.mesh.data_size)
        return ShardedStates(optimizer, self.parameters(), owners, self.mesh)

    # names and parameters

    @property
    def called(self) -> nn.Module:
        return self._called

    @property
    def plain(self) -> nn.Module:
        return self.module

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters()) if self.sharded is None else self.sharded.shards

    def _computed_with(self) -> dict[str, nn.Parameter]:
        """Return the whole parameters, whose gradients a step computes."""
        return self.parameters() if self.sharded is None else self.sharded.wholes

    def _tensor(self, name: str) -> torch.Tensor:
        owner, _, key = name.rpartition(".")
        tensor: torch.Tensor = getattr(self.module.get_submodule(owner), key)
        return tensor

    def _ranks_of(self, name: str) -> frozenset[int]:
        """Return the ranks (by stage) that hold a tensor."""
        held = self.partition.held.get(self._aliases.get(name, name))
        every = range(self._stages)
        return frozenset(every if held is None else (v % self._stages for v in held))

    def parted_axes(self, name: str) -> frozenset[str]:
        is_everywhere = len(self._ranks_of(name)) == self._stages
        own = frozenset() if is_everywhere else frozenset({STAGE})
        return own | super().parted_axes(name)

    def axes_of_states(self, name: str) -> frozenset[str]:
        data = frozenset({DATA}) if self.states is not None else frozenset()
        return super().axes_of_states(name) | data

    def holds_states(self, name: str) -> bool:
        return self.states is None or self.states.holds(name)

    @property
    def is_parted(self) -> bool:
        return True

    @property
    def is_sharded(self) -> bool:
        return self.sharded is not None

    @property
    def has_collective_forward(self) -> bool:
        return self.sharded is not None  # also over the replicas, which gather parameters

    def is_first_copy(self, name: str) -> bool:
        ranks = self._ranks_of(name)
        return len(ranks) == self._stages or self.mesh.place[STAGE] == min(ranks)

    # gradients and buffers

    @property
    def is_distributed(self) -> bool:
        return True

    def set_gradient_sync(self, enabled: bool) -> None:
        self._syncs = enabled

    def set_buffer_sync(self, enabled: bool) -> None:
        if self.mesh.data_size > 1:
            self._buffers.set(enabled)

    def _create_tie_groups(self) -> list[tuple[Any, list[nn.Parameter]]]:
        """Return the tied parameters of this rank with the groups of the ranks that hold them."""
        own, found = self._computed_with(), []
        names = {name for name, _ in self.skeleton.model.named_parameters()}
        for stages in sorted({tuple(sorted(self._ranks_of(name))) for name in names}):
            if len(stages) == 1:
                continue
            group = self._group_of(stages)
            if self.mesh.place[STAGE] in stages:
                tied = [p for name, p in own.items() if self._ranks_of(name) == set(stages)]
                found.append((group, tied))
        return found

    def _group_of(self, stages: Collection[int]) -> Any:
        """Return the group of these stages of this rank's data rank. Collective."""
        if len(stages) == self._stages:
            return self.mesh.group(STAGE)
        found = None
        for first in self.mesh.first_of_data_ranks:
            ranks = self.mesh.ranks_along((STAGE,), first)
            chosen = [ranks[stage] for stage in stages]
            made = dist.new_group(chosen)
            if self.mesh.rank in chosen:
                found = made
        return found

    # plans

    def _plan(self, inputs: Any) -> ForwardPlan:
        """Return the plan for inputs of these shapes, in the present modes."""
        flat, spec = tree_flatten(inputs)
        leaves = tuple(
            (tuple(t.shape), t.dtype, t.requires_grad) if torch.is_tensor(t) else repr(t)
            for t in flat
        )
        device = self.skeleton.device.type
        key = (
            *(repr(spec), leaves, self.skeleton.modes(self.module), torch.is_grad_enabled()),
            *(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
        )
        if key not in self._plans:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            trace = self.skeleton.trace(self.module, inputs)
            self._check_kept()
            if self.skeleton.kept:
                name = next(iter(self.skeleton.kept))
                self._say(
                    f"pipeline: the forward keeps {name}, which has a gradient, "
                    "as an attribute: at most its own stage has it, and reading it elsewhere is "
                    "an error. HINT: return it from the forward, if the loss uses it"
                )
            virtual = self._stages * chunks_of(self.schedule)
            plan = plan_forward(trace, self.partition.held, virtual, self._has_example)
            self._plans[key] = plan
            own = range(self.mesh.place[STAGE], virtual, self._stages)
            run_here = {event.target for stage in own for _, event in plan.stages[stage].events}
            atoms = [name for name in self.skeleton.atoms.names if name in run_here]
            mark_kept(self.module, self.skeleton.kept, atoms)
        return self._plans[key]

    def _check_kept(self) -> None:
        for name in self.skeleton.kept:
            value = self.skeleton.kept[name]
            if isinstance(value, (int, float, torch.Tensor)):
                raise ValueError(
                    f"pipeline: the forward replaces the attribute {name} by a tensor with a "
                    "gradient, and stages that do not run it keep the old value. HINT: return it "
                    f"from the forward; or {name} = None before world.distribute, if it is not "
                    "for the loss"
                )

    def _check_changes(self, plan: ForwardPlan) -> None:
        """Raise ValueError for a forward whose changes depend on the number of micro-batches."""
        for name, line in plan.changes.items():
            if not is_deferred(self.skeleton.model, name):
                raise ValueError(
                    f"pipeline: the forward changes {name} ({line}), once for each micro-batch, "
                    "and one process once for each batch. HINT: layout='... + micro-batches=1', "
                    "change it outside of the forward, or layout='data'"
                )

    def _changed_grads(self) -> int:
        """Return the number (from 1) of a parameter with another requires_grad; 0: none."""
        own = self.parameters()
        for number, (name, parameter) in enumerate(self.skeleton.model.named_parameters(), start=1):
            if name in own and own[name].requires_grad != parameter.requires_grad:
                return number
        return 0

    def _agree(
        self, plans: Mapping[int, ForwardPlan], sizes: list[int], is_weighted: bool = False
    ) -> tuple[list[int], list[int], bool]:
        """Check that all stages have the same batch; raises ValueError on all of them. Collective.

        Otherwise they would wait for messages that nobody sends.

        Returns:
            Of each stage, the times of the last batch in training (ns): of computing, and of all.
            Whether the loss is weighted on any stage.
        """
        wires = [(n, plan.wires) for n, plan in plans.items()]
        content = repr((wires, sizes)).encode()
        digest = hashlib.blake2b(content, digest_size=8).digest()
        executor = self._executor
        own = [
            *(int.from_bytes(digest, signed=True), executor.busy_ns, executor.train_ns),
            *(int(is_weighted), self._changed_grads()),
        ]
        every = gather_equal(torch.tensor(own, device=self.skeleton.device), executor.group)
        digests, busy, whole, weighted, changed = torch.stack(every).T.tolist()
        self._check_grads(changed)
        differing = [
            self.mesh.name(rank)
            for rank, digest in zip(executor.ranks, digests, strict=True)
            if digest != digests[0]
        ]
        if differing:
            raise ValueError(
                f"pipeline: {' and '.join(differing)} has another batch or model than "
                f"{self.mesh.name(self._executor.ranks[0])}: other shapes, dtypes, modes or "
                "requires_grad. HINT: world.shard, which gives all stages the same samples; set "
                "requires_grad before world.distribute"
            )
        return busy, whole, any(weighted)

    def _check_grads(self, numbers: list[int]) -> None:
        if any(numbers):
            at = next(number for number in numbers if number)
            name, parameter = list(self.skeleton.model.named_parameters())[at - 1]
            raise ValueError(
                f"pipeline: requires_grad of {name} was {parameter.requires_grad} in "
                "world.distribute, and has changed. HINT: set requires_grad before "
                "world.distribute, and begin again from a checkpoint for the next phase"
            )

    # a step

    def run_step(self, step: TrainingStep) -> torch.Tensor:
        check_hooks(self.module)
        samples = samples_of(step.inputs, step.targets)
        asked = self.micro_batches
        if asked is not None and self._is_first_step:
            check_count(samples, asked)  # a later batch with fewer samples is the last of an epoch
        current = self._next_schedule(samples)
        count = current.micro_batches
        sizes = sizes_of(samples, count)
        inputs, targets = split(step.inputs, sizes), split(step.targets, sizes)
        with torch.enable_grad():
            different = dict(zip(reversed(sizes), reversed(inputs), strict=True))
            plans = {size: self._plan(part) for size, part in different.items()}
            is_weighted = self._is_weighted(step, plans[sizes[0]], targets[0])
            if len(sizes) > 1:
                for plan in plans.values():
                    self._check_changes(plan)
        busy, whole, is_weighted = self._agree(plans, sizes, is_weighted)
        self._is_first_step = False
        if self._choice is not None and (line := self._choice.begin(max(whole), self._samples)):
            self._say(line)
        self._samples = samples
        if self._balance is None and (self._choice is None or self._choice.chosen == current):
            self._balance = StageTimes(
                *(self.partition, current.schedule, self._say, self._note),
                is_timed=self.skeleton.device.type == "cpu",
            )
        if self._balance is not None:
            self._balance.add(busy, whole, len(sizes))
        if self.mesh.data_size > 1 and self._buffers.enabled:
            with torch.no_grad():
                self._buffers.broadcast()
        is_due = len(sizes) > 1 and self._comparisons.is_due(_loss_key(step.loss), step.targets)
        whole_targets = (step.targets,) if is_due else None
        # how much a micro-batch counts is known after the forwards of all
        each = [plans[size] for size in sizes]
        batch = Batch(
            inputs,
            targets,
            sizes,
            each,
            current.schedule,
            forwards_first=is_weighted,
            whole_targets=whole_targets,
        )
        gathered = nullcontext() if self.sharded is None else self.sharded.gathered()
        with step.backward(None), gathered:
            tied = [p for _, of in self._tie_groups for p in of]
            before = [p.grad for p in tied]
            for parameter in tied:  # copies sum the gradients of this batch only
                parameter.grad = None
            mean = self._executor.train(batch, step)
            for group, parameters in self._tie_groups:
                reduce_gradients(parameters, group, 1)
            for parameter, gradient in zip(tied, before, strict=True):
                if gradient is not None:
                    own = parameter.grad
                    parameter.grad = gradient if own is None else gradient.add_(own)
            self._average_gradients(step)
        return mean

    def _average_gradients(self, step: TrainingStep) -> None:
        """Average gradients over the replicas: sharded ones after each batch of an accumulation."""
        if self.mesh.data_size == 1 or not (self._syncs or self.sharded is not None):
            return
        trained = [p for p in self._computed_with().values() if p.requires_grad]
        step.note_exchange(self.mesh.data_group, [p.grad for p in trained if p.grad is not None])
        if self.sharded is not None:
            self.sharded.reduce_gradients()
        else:
            reduce_gradients(trained, self.mesh.data_group, self.mesh.data_size)

    def _next_schedule(self, samples: int) -> Candidate:
        """Return the schedule and the number of micro-batches of a step."""
        if self.schedule != AUTO:
            default = MICRO_BATCHES_OF_STAGE * self._stages
            return Candidate(self.schedule, self.micro_batches or default)
        if self._choice is None:
            has_norms = any(
                isinstance(module, _BatchNorm) for module in self.skeleton.model.modules()
            )
            found = candidates_for(
                *(self._stages, self.micro_batches, samples),
                can_split=self._can_split,
                may_differ=not has_norms,
            )
            self._choice = ScheduleChoice(found, samples)
        return self._choice.next()

    def _is_weighted(self, step: TrainingStep, plan: ForwardPlan, targets: Any) -> bool:
        """Return whether a loss returns a sum and a weight, or can't be asked without data."""
        key = _loss_key(step.loss)
        if key not in self._weighted:
            if len(self._weighted) >= MAX_PLANS:
                self._weighted.clear()
            self._weighted[key] = self._returns_pair(step.loss, plan, targets)
        return self._weighted[key]

    def _returns_pair(self, loss: Loss, plan: ForwardPlan, targets: Any) -> bool:
        device = self.skeleton.device
        try:
            with self.skeleton.mode:
                outputs = tree_unflatten(
                    [
                        leaf if of is None else torch.empty(of[0], dtype=of[1], device=device)
                        for leaf, of in zip(plan.leaves, plan.output_values, strict=True)
                    ],
                    plan.spec,
                )
                fakes = tree_map_only(torch.Tensor, lambda t: empty_as(t, device), targets)
                return isinstance(loss(outputs, fakes), tuple)
        except Exception:  # of any code of the user's loss, which then runs with data
            return True

    # evaluation

    @torch.no_grad()
    def _evaluate(self, inputs: Any) -> Any:
        plan = self._plan(inputs)
        self._agree({0: plan}, [])
        with nullcontext() if self.sharded is None else self.sharded.gathered():
            return tree_unflatten(self._executor.evaluate(inputs, plan), plan.spec)
