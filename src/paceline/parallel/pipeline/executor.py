"""Run the schedule of one batch on one rank: its messages, backwards and random numbers."""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from ...cost.layout import chunks_of
from ...data.sampling.sample_order import preserve_random_states
from ...optim.gradients import graph_nodes
from ...record.ring.recorder import now
from ...record.ring.states import BACKWARD_PARTS, PARTS_PER_CHUNK, State
from ..mesh import STAGE, Mesh
from ..strategy.training_step import TrainingStep
from .execution.deferred_norms import DeferredNorms
from .execution.micro_batches import check_whole, detached, whole_loss
from .execution.schedules import SCHEDULES, Action
from .stage_plan import ForwardPlan, Wire
from .stage_runner import Activations, StageModule, check_loss, run_backward, run_forward

# A backward in two parts: first the gradients of a stage's inputs, later those of its parameters.
#
# The stage before waits for the first part only. It stands on the functions that PyTorch's own
# zero-bubble schedules use.


class SplitBackward:
    """The backward of one micro-batch in one stage.

    Args:
        outputs: What the stage has computed; of the last stage, its loss.
        gradients: Of each output; None: it has none, or it is the loss.
        leaves: What the stage has received.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        leaves: Sequence[torch.Tensor],
    ) -> None:
        is_loss = len(outputs) == 1 and gradients[0] is None
        pairs = [
            (t, g)
            for t, g in zip(outputs, gradients, strict=True)
            if t.requires_grad and (is_loss or g is not None)
        ]
        self._outputs = [tensor for tensor, _ in pairs]
        # None for a loss
        self._gradients: list[Any] | None = None if is_loss else [gradient for _, gradient in pairs]
        self._leaves = [leaf for leaf in leaves if leaf.requires_grad]
        self._groups: list[dict[str, Any]] | None = None

    def of_inputs(self, parameters: Iterator[nn.Parameter]) -> None:
        """Compute the gradients of the leaves; a stage without any computes all of them later."""
        given = self._gradients or [None] * len(self._outputs)
        reaching: list[tuple[torch.Tensor, Any]] = []
        others: list[tuple[torch.Tensor, Any]] = []
        for pair in zip(self._outputs, given, strict=True):
            (reaching if self._reaches_leaf(pair[0]) else others).append(pair)
        if not reaching:
            return
        relayed = {id(leaf) for leaf in self._leaves}
        # PyTorch detaches the outputs in place, which neither leaves nor views allow, nor an
        # operation that has saved one to compute another one
        several = len(reaching) > 1
        outputs = [t * 1 if several or id(t) in relayed or t._is_view() else t for t, _ in reaching]
        gradients: Any = [g for _, g in reaching] if self._gradients is not None else None
        weights = (p for p in parameters if p.requires_grad)
        _, self._groups = stage_backward_input(outputs, gradients, self._leaves, weights)
        # PyTorch finds parameters on paths to the leaves only
        self._outputs, self._gradients = [t for t, _ in others], [g for _, g in others]

    def _reaches_leaf(self, output: torch.Tensor) -> bool:
        leaves = {id(leaf) for leaf in self._leaves}
        nodes = graph_nodes([output.grad_fn])
        reached = (id(getattr(node, "variable", None)) for node in nodes)
        return id(output) in leaves or not leaves.isdisjoint(reached)

    def of_parameters(self, parameters: Iterator[nn.Parameter]) -> None:
        """Add the gradients of the parameters to those that they have."""
        if self._outputs:
            shares_graph = self._groups is not None
            torch.autograd.backward(self._outputs, self._gradients, retain_graph=shares_graph)
        if self._groups is not None:
            stage_backward_weight((p for p in parameters if p.requires_grad), self._groups)
        self._outputs, self._groups = [], None


# Random numbers of a pipeline: those of a module depend on neither stages nor schedule.
#
# Ranks that share samples draw equal numbers from the global generators, which must stay equal on
# all of them. In a step, each event of each micro-batch draws from a seed of its own; afterwards
# the generators continue as if nothing had been drawn but the seed of the step.

_ODD = 0x9E3779B97F4A7C15  # golden ratio: seeds that follow each other differ in all bits
_BITS = (1 << 63) - 1


class RandomStreams:
    """The generators of one rank during a step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._base = device, 0

    @contextmanager
    def of_step(self, stage: int) -> Iterator[None]:
        """Draw the seed of a step, and restore the global generators at its end."""
        self._base = int(torch.randint(1 << 62, ()).item())
        devices = [self.device] if self.device.type == "cuda" else []
        with preserve_random_states(), torch.random.fork_rng(devices):
            # modules that draw from these generators get other numbers on each stage and step
            random.seed(self._mixed(0, stage))
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(self._mixed(1, stage) & 0xFFFFFFFF)
            yield

    def seed_event(self, micro_batch: int, event: int) -> None:
        """Seed the generators for one event."""
        seed = self._mixed(micro_batch + 2, event)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(seed)

    def _mixed(self, one: int, other: int) -> int:
        mixed = (self._base ^ (one << 32 | other)) * _ODD & ((1 << 64) - 1)
        return (mixed ^ mixed >> 29) & _BITS


# Messages between two neighbouring stages, in one direction.
#
# A send never waits for the other stage, and a receive is posted before it is needed, so no order
# of computations that a schedule gives can deadlock. Messages of a lane arrive in the order of
# sending.


class Lane:
    """The messages between this rank and one other.

    Args:
        peer: Global rank of the other one.
        tag: Distinguishes the lanes between two ranks.
    """

    def __init__(self, mesh: Mesh, group: Any, peer: int, tag: int) -> None:
        self.mesh, self.group, self.peer, self.tag = mesh, group, peer, tag
        self._sent: deque[list[tuple[Any, torch.Tensor]]] = deque()
        self._expected: deque[tuple[list[torch.Tensor], list[Any]]] = deque()

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Send a message of tensors; they must not be changed in place before it has left."""
        flat = [tensor.detach().contiguous() for tensor in tensors]
        works = [
            self._try(lambda t=tensor: dist.isend(t, self.peer, self.group, self.tag))
            for tensor in flat
        ]
        self._sent.append(list(zip(works, flat, strict=True)))

    def expect(self, buffers: Sequence[torch.Tensor]) -> None:
        """Begin to receive the tensors of the next message."""
        works = [
            self._try(lambda b=buffer: dist.irecv(b, self.peer, self.group, self.tag))
            for buffer in buffers
        ]
        self._expected.append((list(buffers), works))

    def receive(self) -> list[torch.Tensor]:
        """Wait for the oldest expected message, and return its tensors."""
        buffers, works = self._expected.popleft()
        for work in works:
            self._try(work.wait)
        return buffers

    def settle(self, unfinished: int = 0) -> None:
        """Wait until at most this many messages have not left."""
        while len(self._sent) > unfinished:
            for work, _ in self._sent.popleft():
                self._try(work.wait)

    def settle_oldest(self) -> None:
        """Free the oldest message, which the other stage has answered."""
        self.settle(max(len(self._sent) - 1, 0))

    def _try(self, call: Any) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise RuntimeError(
                f"pipeline: {self.mesh.name()} lost {self.mesh.name(self.peer)}, with which it "
                f"exchanges activations: {error}"
            ) from error


_RECORDED_PARTS = {kind: part for part, kind in BACKWARD_PARTS.items()} | {"F": 0}


@dataclass(frozen=True)
class Batch:
    """One batch, divided into micro-batches.

    Attributes:
        inputs, targets, sizes, plans: Of each micro-batch.
        schedule: Name of the schedule.
        forwards_first: Whether all forwards come before the first backward, in any schedule.
        whole_targets: Those of the whole batch, for the comparison of its loss with that of its
            micro-batches; None: they are not compared.
    """

    inputs: Sequence[Any]
    targets: Sequence[Any]
    sizes: Sequence[int]
    plans: Sequence[ForwardPlan]
    schedule: str
    forwards_first: bool = False
    whole_targets: tuple[Any] | None = None


@dataclass(eq=False)
class _Run:
    """The state of one batch."""

    batch: Batch
    step: Any  # a TrainingStep; None in evaluation
    held: dict[tuple[int, int], Activations] = field(default_factory=dict)
    split: dict[tuple[int, int], SplitBackward] = field(default_factory=dict)
    losses: dict[int, tuple[torch.Tensor, Any]] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)  # of all micro-batches, to compare losses


class Executor:
    """The stages of this rank.

    Attributes:
        mesh: The ranks; ``stage`` is one of its axes.
        ranks: Global rank of each stage, of the ranks that share this one's samples.
        stage: Number of this rank's stage.
        busy_ns, train_ns: Of the last batch: time of computing, and of all.
    """

    def __init__(self, mesh: Mesh, stage: StageModule, norms: DeferredNorms, device: Any) -> None:
        self.mesh, self.module, self.norms, self.device = mesh, stage, norms, device
        self.ranks = mesh.ranks_along((STAGE,))
        self.stage, self.stages = mesh.place[STAGE], len(self.ranks)
        self.group = mesh.group(STAGE)
        self.random = RandomStreams(device)
        self.busy_ns = self.train_ns = 0
        self._lanes: dict[tuple[int, bool], Lane] = {}

    # lanes

    def _lane(self, border: int, is_backward: bool) -> Lane:
        """Return this rank's side of the lane over the border after a virtual stage."""
        key = (border, is_backward)
        if key not in self._lanes:
            before, after = border % self.stages, (border + 1) % self.stages
            peer = self.ranks[after if before == self.stage else before]
            self._lanes[key] = Lane(self.mesh, self.group, peer, 2 * border + is_backward + 1)
        return self._lanes[key]

    def _expect(self, run: _Run, virtual: int, micro_batch: int, is_backward: bool) -> None:
        """Post the receives of a micro-batch in a virtual stage, if there is one."""
        if micro_batch >= len(run.batch.plans):
            return
        border = virtual if is_backward else virtual - 1
        if border < 0:
            return
        plan = run.batch.plans[micro_batch]
        if border >= len(plan.wires):
            return
        wires = plan.wires[border]
        if is_backward:
            wires = _with_grad(wires)
        buffers = [torch.empty(w.shape, dtype=w.dtype, device=self.device) for w in wires]
        if is_backward and len(wires) > 1:
            buffers.append(torch.empty(len(wires), dtype=torch.uint8, device=self.device))
        self._lane(border, is_backward).expect(buffers)

    # a batch in training

    def train(self, batch: Batch, step: TrainingStep) -> torch.Tensor:
        """Run forwards and backwards of a batch; return its mean loss. Collective."""
        run = _Run(batch, step)
        begin, self.busy_ns = now(), 0
        chunks = chunks_of(batch.schedule)
        virtual = [self.stage + self.stages * chunk for chunk in range(chunks)]
        for stage in virtual:
            self._expect(run, stage, 0, is_backward=False)
            self._expect(run, stage, 0, is_backward=True)
        actions: dict[str, Callable[[_Run, int, int], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_of_inputs,
            "W": self._backward_of_parameters,
        }
        self.norms.begin()
        is_complete = False
        try:
            with self.random.of_step(self.stage):
                for kind, chunk, micro_batch in self._actions(batch):
                    actions[kind](run, virtual[chunk], micro_batch)
            is_complete = True
        finally:
            self.norms.end(is_complete)
        for lane in self._lanes.values():
            lane.settle()
        mean = self._share_loss(run)
        self.train_ns = now() - begin
        return mean

    def _note_part(self, run: _Run, action: Action, start: int) -> None:
        """Record the computation of a micro-batch, which ends now."""
        self.busy_ns += now() - start
        state = State.FORWARD if action.kind == "F" else State.BACKWARD
        part = action.chunk * PARTS_PER_CHUNK + _RECORDED_PARTS[action.kind]
        run.step.note_part(state, start, action.micro_batch + 1, part)

    def _actions(self, batch: Batch) -> Sequence[Action]:
        found = list(SCHEDULES[batch.schedule](self.stage, self.stages, len(batch.plans)))
        return (
            sorted(found, key=lambda action: action.kind != "F") if batch.forwards_first else found
        )

    def _forward(self, run: _Run, virtual: int, m: int) -> None:
        plan = run.batch.plans[m]
        received = self._receive(run, virtual, m, is_backward=False)
        start = now()
        with self.norms.collecting():
            found = run_forward(
                *(self.module, plan, virtual, run.batch.inputs[m], received),
                lambda event: self.random.seed_event(m, event),
            )
        run.held[virtual, m] = found
        if virtual == len(plan.stages) - 1:
            run.losses[m] = run.step.loss_of(found.outputs, run.batch.targets[m])
            if run.losses[m][1] is not None and not run.batch.forwards_first:
                raise ValueError(
                    "world.forward_backward: the loss returns a pair now, and the mean alone "
                    "without data. HINT: always return the sum and its weight"
                )
            if m == 0:
                check_loss(run.losses[m][0], found.outputs, self.module.module)
            if run.batch.whole_targets is not None:
                run.outputs.append(detached(found.outputs))
            found.outputs = None
        self._note_part(run, Action("F", virtual // self.stages, m), start)
        if found.sent:
            self._lane(virtual, is_backward=False).send(found.sent)

    def _receive(self, run: _Run, virtual: int, m: int, is_backward: bool) -> list[torch.Tensor]:
        border = virtual if is_backward else virtual - 1
        if border < 0 or border >= len(run.batch.plans[m].wires):
            return []
        found = self._lane(border, is_backward).receive()
        self._expect(run, virtual, m + 1, is_backward)
        return found

    def _gradients(self, run: _Run, virtual: int, m: int) -> list[torch.Tensor | None]:
        """Return the gradients of what a stage has sent; None where it has none."""
        wires = run.batch.plans[m].stages[virtual].sent
        with_grad = _with_grad(wires)
        received = self._receive(run, virtual, m, is_backward=True)
        if with_grad:
            self._lane(virtual, is_backward=False).settle_oldest()
        has = received[-1].tolist() if len(with_grad) > 1 else [1] * len(with_grad)
        found = iter([g if h else None for g, h in zip(received, has, strict=False)])
        return [next(found) if wire in with_grad else None for wire in wires]

    def _send_gradients(self, run: _Run, virtual: int, m: int, leaves: Sequence[Any]) -> None:
        wires = run.batch.plans[m].stages[virtual].received
        pairs = [(w, leaf) for w, leaf in zip(wires, leaves, strict=True) if w.requires_grad]
        if not pairs:
            return
        each = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for _, leaf in pairs]
        if len(pairs) > 1:
            has = [leaf.grad is not None for _, leaf in pairs]
            each.append(torch.tensor(has, dtype=torch.uint8, device=self.device))
        lane = self._lane(virtual - 1, is_backward=True)
        lane.send(each)
        if chunks_of(run.batch.schedule) == 1:  # else ranks also wait for each other in a circle
            lane.settle(unfinished=self.stages)

    def _backward(self, run: _Run, virtual: int, m: int) -> None:
        held = run.held.pop((virtual, m))
        is_last = virtual == len(run.batch.plans[m].stages) - 1
        gradients = [] if is_last else self._gradients(run, virtual, m)
        start = now()
        if is_last:
            self._loss(run, m).backward()
        else:
            run_backward(held, gradients)
        self._note_part(run, Action("B", virtual // self.stages, m), start)
        self._send_gradients(run, virtual, m, held.received)

    def _backward_of_inputs(self, run: _Run, virtual: int, m: int) -> None:
        held = run.held.pop((virtual, m))
        is_last = virtual == len(run.batch.plans[m].stages) - 1
        gradients = [None] if is_last else self._gradients(run, virtual, m)
        start = now()
        outputs = [self._loss(run, m)] if is_last else held.sent
        split = SplitBackward(outputs, gradients, held.received)
        split.of_inputs(self.module.module.parameters())
        run.split[virtual, m] = split
        self._note_part(run, Action("I", virtual // self.stages, m), start)
        self._send_gradients(run, virtual, m, held.received)

    def _backward_of_parameters(self, run: _Run, virtual: int, m: int) -> None:
        start = now()
        run.split.pop((virtual, m)).of_parameters(self.module.module.parameters())
        self._note_part(run, Action("W", virtual // self.stages, m), start)

    # losses

    def _loss(self, run: _Run, m: int) -> torch.Tensor:
        """Return what the backward of a micro-batch begins with, on the last stage."""
        mean, weight = run.losses[m]
        if not mean.requires_grad:
            raise ValueError(
                "world.forward_backward: the loss depends on no parameter with requires_grad. "
                "HINT: compute it from the outputs, without detach() and torch.no_grad()"
            )
        if weight is not None:
            weight = self._total_weight(run)
        scaled: torch.Tensor = run.step.scaled(mean, weight, self._part(run, m))
        return scaled

    def _total_weight(self, run: _Run) -> torch.Tensor:
        assert len(run.losses) == len(run.batch.plans)  # because of forwards_first
        return sum((w for _, w in run.losses.values()), start=torch.zeros(()))

    def _part(self, run: _Run, m: int) -> float:
        """Return the share of a micro-batch of its batch's loss."""
        weight = run.losses[m][1]
        if weight is None:
            return run.batch.sizes[m] / sum(run.batch.sizes)
        total = float(self._total_weight(run))
        return float(weight) / total if total else 0.0

    def _share_loss(self, run: _Run) -> torch.Tensor:
        """Return the mean loss of the batch, on all ranks that share it. Collective."""
        shared = torch.zeros(4, dtype=torch.float64, device=self.device)
        for m, (loss, _) in run.losses.items():
            shared[3] = float(loss.dtype == torch.float64)
            shared[0] += loss.detach().double().reshape(()) * self._part(run, m)
        if run.losses and run.batch.whole_targets is not None:
            losses = [loss.detach() for loss, _ in run.losses.values()]
            targets = run.batch.whole_targets[0]
            shared[1:3] = whole_loss(run.step, run.outputs, targets, run.batch.sizes, losses)
        dist.broadcast(shared, self._last_rank(run.batch.plans[0]), self.group)
        mean, expected, bound, is_double = shared.tolist()
        check_whole(mean, expected, bound)
        return shared[0] if is_double else shared[0].float()

    def _last_rank(self, plan: ForwardPlan) -> int:
        return self.ranks[(len(plan.stages) - 1) % self.stages]

    # evaluation

    @torch.no_grad()
    def evaluate(self, inputs: Any, plan: ForwardPlan) -> list[Any]:
        """Run a forward of a batch; return the leaves of the outputs, on all ranks. Collective."""
        run = _Run(Batch([inputs], [None], [1], [plan], "gpipe"), None)
        outputs: Any = None
        with self.random.of_step(self.stage):
            for virtual in range(self.stage, len(plan.stages), self.stages):
                self._expect(run, virtual, 0, is_backward=False)
                received = self._receive(run, virtual, 0, is_backward=False)
                found = run_forward(
                    *(self.module, plan, virtual, inputs, received),
                    lambda event: self.random.seed_event(0, event),
                )
                if found.sent:
                    self._lane(virtual, is_backward=False).send(found.sent)
                outputs = found.outputs
        for lane in self._lanes.values():
            lane.settle()
        return self._spread(outputs, plan)

    def _spread(self, outputs: Any, plan: ForwardPlan) -> list[Any]:
        """Send the outputs of the last stage to the others."""
        last = self._last_rank(plan)
        if self.mesh.rank == last:
            leaves = torch.utils._pytree.tree_leaves(outputs)
            others = [Lane(self.mesh, self.group, r, 0) for r in self.ranks if r != last]
            tensors = [t for t in leaves if torch.is_tensor(t)]
            for lane in others:
                lane.send(tensors)
            for lane in others:
                lane.settle()
            return leaves
        lane = Lane(self.mesh, self.group, last, 0)
        lane.expect(
            [
                torch.empty(of[0], dtype=of[1], device=self.device)
                for of in plan.output_values
                if of is not None
            ]
        )
        received = iter(lane.receive())
        return [
            next(received) if of is not None else leaf
            for leaf, of in zip(plan.leaves, plan.output_values, strict=True)
        ]


def _with_grad(wires: Sequence[Wire]) -> tuple[Wire, ...]:
    return tuple(wire for wire in wires if wire.requires_grad)
