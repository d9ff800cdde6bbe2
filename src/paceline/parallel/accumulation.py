"""Batches of training loops, and groups of batches whose gradients are summed for one step.

A group is a number of consecutive batches of one loop, which belongs to a model
(``world.distribute(model, accumulate=4)``). It also ends with the last batch of the loop's pass.
A loop that is left inside a group (``break``) discards the group's gradients. A loop inside another
one has separate groups; those of the outer loop wait until it ends.

The loss of each batch is weighted so that the sum over a group, averaged over ranks, is the mean
over its samples. Where the number of samples is unknown in advance, or differs between models, the
weight assumes a number, and ``Accumulation.correction`` is the factor for the summed gradients.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from ..data.sampling.sample_order import BatchShare
from ..optim.gradients import count_parameters, parameters_of
from ..optim.whole_norms import local_part
from .mesh import Mesh
from .strategy.distributed_model import DistributedModel


@dataclass(frozen=True, eq=False)
class LoadedBatch:
    """One batch as its loader describes it.

    Attributes:
        loop: The pass that the batch belongs to, compared by identity.
        share: This rank's part of the global batch.
        units: Weight of the batch in its group over all ranks: its samples; 1 where the loader is
            not sharded.
        nominal: Units of a usual batch.
        group_total: Returns the units of the batch's group, for a number of batches; None where
            they are not known yet.
    """

    loop: object
    share: BatchShare
    units: float
    nominal: float
    group_total: Callable[[int], float | None]


@dataclass(eq=False)
class Batch:
    """One batch of a training loop.

    Attributes:
        loaded: The batch's pass, share and units.
        weight: Factor of the batch's loss.
        assumed_units: Units of the whole group that ``weight`` assumes.
        is_exact: Whether ``assumed_units`` is the true number.
        backwards: Number of ``world.backward`` of this batch.
    """

    loaded: LoadedBatch
    weight: float
    assumed_units: float
    is_exact: bool
    backwards: int = 0


@dataclass(eq=False)
class Group:
    """The current group of one loop, for one model.

    Attributes:
        loop: The pass that the group belongs to, compared by identity.
        batches: Batches of the group until now.
        units: Sum of ``LoadedBatch.units`` over them.
        is_complete: Whether the group has its last batch, so that the optimizer may step.
        correction: Factor for the gradients of a complete group.
        has_outer_gradients: Whether the model had gradients of an outer loop when the group began.
    """

    loop: object
    batches: int = 0
    units: float = 0.0
    is_complete: bool = True
    correction: float = 1.0
    has_outer_gradients: bool = False


@dataclass(eq=False)
class Accumulation:
    """The groups of batches that one model accumulates.

    Attributes:
        model: The model in its layout.
        every: Number of batches of a whole group.
        groups: Those of the running loops; the last one is the innermost loop's.
        correction: Factor for the gradients of a complete group.
    """

    model: DistributedModel
    every: int
    groups: list[Group] = field(default_factory=list)
    correction: float = 1.0

    @property
    def is_complete(self) -> bool:
        """Whether the innermost loop's group has its last batch, so that the optimizer may step."""
        return not self.groups or self.groups[-1].is_complete

    @property
    def is_between_groups(self) -> bool:
        """Whether no gradients of completed batches wait, also not in an outer loop."""
        return self.is_complete and all(group.batches <= 1 for group in self.groups[:-1])

    def begin(self, batch: Batch) -> None:
        """Add a batch to the group of its loop, or begin a group with it."""
        loaded = batch.loaded
        group = self._take(loaded.loop) or Group(loaded.loop)
        if group.is_complete:
            group.batches, group.units = 0, 0.0
            is_inner = bool(self.groups)
            group.has_outer_gradients = is_inner and self.model.has_gradients()
        self.groups.append(group)
        group.batches += 1
        group.units += loaded.units
        group.is_complete = (loaded.share.position + 1) % self.every == 0 or loaded.share.last
        group.correction = 1.0 if batch.is_exact else batch.assumed_units / group.units
        self._go_on()

    def end_loop(self, loop: object) -> int:
        """End the group of a loop, and go on with that of the loop around it.

        Discard the gradients of an incomplete group; return its number of batches, or 0.
        """
        group = self._take(loop)
        if group is None:
            return 0
        self._go_on()
        is_kept = group.is_complete or group.has_outer_gradients
        if is_kept or not self.model.has_gradients():
            return 0
        self.model.discard_gradients()
        return group.batches

    def _take(self, loop: object) -> Group | None:
        """Remove the group of a loop, and return it."""
        found = next((group for group in self.groups if group.loop is loop), None)
        if found is not None:
            self.groups.remove(found)
        return found

    def _go_on(self) -> None:
        """Apply the innermost loop's group; after the last loop its correction stays."""
        if self.groups:
            self.correction = self.groups[-1].correction
        self.model.set_gradient_sync(self.is_complete)


class Accumulations:
    """The accumulations of all models, and the batches of the loops that are running.

    Attributes:
        mesh: The ranks.
        models: One accumulation for each ``world.distribute``.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.models: list[Accumulation] = []
        self._running: list[Batch] = []  # the last one is the innermost loop's
        self._owners: dict[tuple[int, int, int], list[Accumulation]] = {}
        self._of_optimizer: dict[int, Accumulation] = {}  # by id of an optimizer

    def add(self, accumulation: Accumulation, optimizer: Optimizer | None) -> None:
        """Add the accumulation of a model.

        optimizer: The model's, which may hold no parameter on this rank.
        """
        self.models.append(accumulation)
        if optimizer is not None:
            self._of_optimizer[id(optimizer)] = accumulation

    @property
    def batch(self) -> Batch | None:
        """The batch of the innermost training loop that is running."""
        return self._running[-1] if self._running else None

    @property
    def are_complete(self) -> bool:
        """Whether no model's gradients wait for further batches of their group."""
        return all(model.is_between_groups for model in self.models)

    def begin(self, loaded: LoadedBatch) -> Batch:
        """Begin a batch of a training loop."""
        share, units = loaded.share, loaded.units
        numbers = {model.every for model in self.models} or {1}
        every = min(numbers)
        total = loaded.group_total(every) if len(numbers) == 1 else None
        usual = loaded.nominal * (every if len(numbers) == 1 else 1)
        assumed = total if total is not None else usual
        part = units / self.mesh.data_size
        if share.total:  # 0 where an unsharded loader's batch has no known number of samples
            part = 0.0 if share.filler else units * share.count / share.total
        # DDP averages ranks equally; the weight makes that the mean over the true samples.
        weight = self.mesh.data_size * part / assumed
        batch = Batch(loaded, weight, assumed, total is not None)
        self._running.append(batch)
        for model in self.models:
            model.begin(batch)
        return batch

    def end(self, batch: Batch) -> None:
        """End a batch; without effect if it has ended already."""
        self._running = [other for other in self._running if other is not batch]

    def weigh_backward(self, share: float | None = None) -> float:
        """Count a backward of the current batch; return the factor of its loss.

        It is 1 outside of training loops, where every backward's gradients may be stepped with.

        Args:
            share: This rank's part of the weight of the global batch; None: that of its samples.
        """
        equal = 1.0 if share is None else self.mesh.data_size * share
        if self.batch is None:
            for model in self.models:
                model.correction = 1.0
            return equal
        batch = self.batch
        batch.backwards += 1
        return batch.weight if share is None else equal * batch.loaded.units / batch.assumed_units

    def end_loop(self, loop: object) -> str:
        """End a loop, and discard the gradients of its incomplete groups.

        Return a text such as "2 of 4", or "" if there were none.
        """
        texts = [f"{done} of {m.every}" for m in self.models if (done := m.end_loop(loop))]
        return " and ".join(dict.fromkeys(texts))

    def of(self, optimizer: Optimizer) -> list[Accumulation]:
        """Return the accumulations of the models that an optimizer trains.

        An optimizer without a parameter of a distributed model follows all models. Raises
        ValueError where its models accumulate different numbers of batches.
        """
        key = (id(optimizer), count_parameters(optimizer), len(self.models))
        if key not in self._owners:
            self._owners[key] = self._find_owners(optimizer)
        return self._owners[key]

    def _find_owners(self, optimizer: Optimizer) -> list[Accumulation]:
        ids = {id(parameter) for parameter in parameters_of(optimizer)}
        found = [
            m
            for m in self.models
            if m is self._of_optimizer.get(id(optimizer))
            or any(id(p) in ids for p in m.model.parameters().values())
        ]
        numbers = sorted({model.every for model in found})
        if len(numbers) > 1:
            kind = type(optimizer).__name__
            raise ValueError(
                f"world.step: the {kind} trains models that were distributed with accumulate="
                f"{' and '.join(map(str, numbers))}. HINT: set the same accumulate for all "
                "models of an optimizer, or create an optimizer for each model"
            )
        return found or self.models


_weak_reference: Any = torch._C._WeakTensorRef  # type: ignore[attr-defined]
_Used = tuple[torch.Tensor, Any, int, int]  # parameter, its gradient, address, version


class UsedGradients:
    """Gradients that a plain ``optimizer.step()`` has used, and that the script has not zeroed.

    ``world.step`` zeroes the gradients, ``optimizer.step()`` does not. The next ``world.backward``
    would add to them, as if batches were accumulated, which ``world.distribute(accumulate=...)``
    sets.
    """

    def __init__(self) -> None:
        self._used: list[_Used] = []

    def note_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that a step has used the gradients of its parameters."""
        for parameter in parameters:
            if parameter.grad is not None:
                # a weak reference: the memory is free as soon as the script zeroes the gradient
                own = local_part(parameter.grad)
                used = (parameter, _weak_reference(own), own.data_ptr(), own._version)
                self._used.append(used)

    def discard(self) -> None:
        """Discard the gradients that have not changed since their step."""
        for parameter, weak, address, version in self._used:
            if parameter.grad is None or weak.expired():
                continue
            own = local_part(parameter.grad)
            if (own.data_ptr(), own._version) == (address, version):
                parameter.grad = None
        self._used.clear()
