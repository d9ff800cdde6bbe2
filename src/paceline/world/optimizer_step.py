"""The optimizer step: weighted losses, accumulation, mixed precision, clipping."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..data.sampling.sample_order import BatchShare
from ..knobs.learning_rate import scaled_rates
from ..optim.gradients import LossScaling, gradients_of, has_gradients, parameters_of
from ..optim.whole_norms import holds_shards
from ..parallel.accumulation import Accumulation, Accumulations, Batch, LoadedBatch, UsedGradients
from ..parallel.clipping import clip_gradients
from ..parallel.distribution_check import (
    DistributionCheck,
    unsharded_loaders_in_use,
    watch_parameters,
)
from ..parallel.mesh import Mesh
from ..parallel.replicated.replica import accept_prefixed_keys
from ..parallel.strategy.distributed_model import DistributedModel
from ..parallel.strategy.training_step import Loss, TrainingStep
from ..record.hooks.error_messages import script_line
from ..record.hooks.phases import PhaseRecorder
from ..record.ring.recorder import now
from ..record.ring.states import State
from .training_checks import FiniteCheck, ReplicaDivergenceCheck, validate_mode


class OptimizerSteps:
    """Models and optimizers of one rank, and the state of their current step."""

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        precision: torch.dtype | None,
        phases: PhaseRecorder,
        nonfinite: str,
        replicas: str,
        warn: Callable[[str], None],
    ) -> None:
        self.mesh, self.device = mesh, device
        self.phases = phases
        self.models: list[DistributedModel] = []
        self.optimizers: list[Optimizer] = []
        self.warmups: list[LRScheduler] = []
        # Optimizers, and what returns the factor of their learning rates in the present step
        self.rate_factors: list[tuple[Optimizer, Callable[[], float]]] = []
        self.accumulations = Accumulations(mesh)
        self.backwards = 0  # number of calls of backward
        self.step_calls = 0  # number of calls of step
        self.unstepped_loop = ""  # a loop that was left with gradients, until the next step
        self._stepped: set[int] = set()  # ids of optimizers that have stepped
        self._is_in_step = False  # of world.step; else a step is the script's own
        self._used = UsedGradients()
        self._unstepped_backwards = 0  # since the last step
        self._warn = warn
        self._is_outside_checked = False
        self.loss_scaling = (
            LossScaling(device.type, self.optimizers) if precision is torch.float16 else None
        )
        self._factor: float | None = None  # of the losses of the current backward
        self._has_parts = False  # whether the parts of the current backward are recorded
        self._has_checked_loss = False  # whether this rank has the loss of the current backward
        self._backwards_of: dict[int, int] = {}  # by id of an optimizer: backwards at its last step
        # adds numbers of the data ranks; the world replaces it
        self.sum_over_data: Callable[[torch.Tensor], torch.Tensor] = lambda numbers: numbers
        # whether something is true on any rank; the world replaces it
        self.any_rank: Callable[[bool], bool] = lambda flag: flag
        self.evaluation_share: BatchShare | None = None  # of the current batch of an evaluation
        self.validation_loop = ""  # the innermost validation pass that has not ended, for messages
        self.last_loss: torch.Tensor | float | None = None
        self.last_total = 0  # samples of the last batch over all ranks
        recorder = phases.recorder
        self._watch = recorder.step_watch
        self._finite_check = FiniteCheck(
            mesh, validate_mode("nonfinite", nonfinite), recorder, self.models
        )
        # loss scaling skips steps with infinite gradients
        self._finite_check.check_gradients = self.loss_scaling is None
        self.replicas = ReplicaDivergenceCheck(
            mesh, validate_mode("replicas", replicas), recorder, self.models
        )
        self._distribution_check = DistributionCheck(mesh, replicas, warn)
        recorder.on_backward_reduce = self._exchanging

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        return self.loss_scaling.scaler if self.loss_scaling is not None else None

    def add_model(
        self, model: DistributedModel, accumulate: int, optimizer: Optimizer | None = None
    ) -> None:
        """Add a model that steps once for ``accumulate`` batches.

        optimizer: Its optimizer, which may hold no parameter on this rank.
        """
        if model.is_distributed:
            watch_parameters(model)
        self.phases.watch_model(model.module)
        self.models.append(model)
        accept_prefixed_keys(model.plain)
        self._distribution_check.add_model(model)
        self.accumulations.add(Accumulation(model, accumulate), optimizer)

    def add_optimizer(self, optimizer: Optimizer, in_step: bool = False) -> bool:
        """Add an optimizer, and return whether it was unknown.

        ``in_step``: it is about to step. Raises ValueError then, if it has the parameters of
        another one that was given to ``world.distribute`` and has never stepped.
        """
        if any(optimizer is known for known in self.optimizers):
            return False
        parameters = set(map(id, parameters_of(optimizer)))
        same = [o for o in self.optimizers if set(map(id, parameters_of(o))) == parameters]
        replaced = same[-1] if same and parameters else None
        if in_step and replaced is not None and id(replaced) not in self._stepped:
            kind, known = type(optimizer).__name__, type(replaced).__name__
            raise ValueError(
                f"world.step: this {kind} is not the {known} that was given to world.distribute, "
                "but has the same parameters. HINT: create the optimizer once, before model, "
                "optimizer = world.distribute(model, optimizer)"
            )
        self.phases.watch_optimizer(optimizer, replaced)
        self.optimizers.append(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        return True

    def add_warmup(self, scheduler: LRScheduler) -> None:
        """Add a scheduler that advances with each step of its optimizer, plain or of ``step``."""

        def after_step(*_: Any) -> None:
            # a fused optimizer is called in a step that loss scaling skips
            if not self._is_in_step:
                scheduler.step()

        self.warmups.append(scheduler)
        scheduler.optimizer.register_step_post_hook(after_step)

    # one batch

    def place_batch(self, batch: Any) -> Any:
        """Return the part of this data rank's batch that this rank computes with."""
        is_shared = self.mesh.is_divided and bool(self.models)  # by ranks of the same data rank
        return self.models[0].place_batch(batch) if is_shared else batch

    def begin(self, loaded: LoadedBatch) -> Batch:
        """Begin a batch of a training loop."""
        share = loaded.share
        self.phases.begin()
        self.phases.is_in_loop = True
        self.last_total = share.total
        self.phases.recorder.samples += 0 if share.filler else share.count
        return self.accumulations.begin(loaded)

    def end(self, batch: Batch) -> None:
        """End a batch of a training loop; without effect if it has ended already."""
        self.accumulations.end(batch)
        if self.loss_scaling is not None:
            self.loss_scaling.update()

    @property
    def between_steps(self) -> bool:
        """Whether no gradient waits for further batches of its group."""
        return self.accumulations.are_complete

    @property
    def is_filler(self) -> bool:
        """Whether the current batch only keeps the ranks in step: a repeated sample of weight 0."""
        if self.evaluation_share is not None:
            return self.evaluation_share.filler
        batch = self.accumulations.batch
        return batch is not None and batch.loaded.share.filler

    # the user's two calls

    def backward(self, loss: torch.Tensor) -> None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            is_tensor = isinstance(loss, torch.Tensor)
            shown = (
                f"has the shape {tuple(loss.shape)}" if is_tensor else f"is a {type(loss).__name__}"
            )
            raise ValueError(
                "world.backward: the loss must be a tensor of one element, the batch's mean; "
                f"this {shown}. HINT: world.backward(loss.mean())"
            )
        with self._backward_of(loss, "world.backward"):
            self._scaled(loss).backward()

    def forward_backward(
        self, model: nn.Module, inputs: Any, targets: Any, loss: Loss
    ) -> torch.Tensor:
        distributed = next((known for known in self.models if known.called is model), None)
        if distributed is None:
            raise ValueError(
                f"world.forward_backward: this {type(model).__name__} is not one that "
                "world.distribute has returned. HINT: model, optimizer = world.distribute(model, "
                "optimizer)"
            )
        name = "world.forward_backward"
        step = TrainingStep(
            distributed.module,
            inputs,
            targets,
            loss,
            lambda mean: self._backward_of(mean, name),
            self._scaled,
            self._exchanging,
            self._note_part,
        )
        mean = distributed.run_step(step)
        if self._has_checked_loss:
            self.last_loss = mean if mean.device.type != "cpu" else float(mean)
        else:  # it was computed on another rank, or in parts
            self.last_loss = self._finite_check.check_loss(mean)
            if self._watch is not None:
                self._watch.note_loss(mean)
        return mean

    @contextmanager
    def _backward_of(self, loss: torch.Tensor | None, call: str) -> Iterator[None]:
        """Return the context of the backward of one batch; None: another rank computes its loss.

        Args:
            call: What the script calls, for messages.
        """
        start = self._begin_backward(loss, call)
        is_complete = False
        try:
            yield
            is_complete = True
        finally:
            self._end_backward(start, is_complete)

    def _begin_backward(self, loss: torch.Tensor | None, call: str) -> int:
        """Check the loss, and return the start of the backward (ns)."""
        if loss is not None and not loss.requires_grad:
            raise ValueError(f"{call}: {self._describe_missing_gradient()}")
        self.backwards += 1
        self._has_parts, self._has_checked_loss = False, loss is not None
        if loss is not None:
            self._distribution_check.check_loss(loss)
            self.replicas.check_loss(loss)
        self._check_outside_of_batches()
        start = self.phases.backward_starts()
        if loss is not None:
            self.last_loss = self._finite_check.check_loss(loss)
        if self._watch is not None:
            if loss is not None:
                self._watch.note_loss(loss)
            self._watch.ignores_backward = True
        self._used.discard()
        self._unstepped_backwards += 1
        self._factor = None
        self._distribution_check.before_backward()
        return start

    def _end_backward(self, start: int, is_complete: bool) -> None:
        if not self._has_parts:
            self.phases.recorder.event(State.BACKWARD, start, now())
        if self._watch is not None:
            self._watch.ignores_backward = False
        if not is_complete:
            return
        if self._factor is None:  # this rank has scaled no loss
            self.accumulations.weigh_backward()
        self._distribution_check.after_backward()
        self.replicas.after_backward()

    def _note_part(self, state: State, start: int, number: int, amount: int) -> None:
        """Record the forward or the backward of a part of a batch, which ends now.

        Args:
            number: Of the micro-batch, from 1.
            amount: Its virtual stage and part (record/ring/states.py).
        """
        self._has_parts = True
        self.phases.recorder.event(state, start, now(), amount=amount, seq=number)

    def _scaled(
        self, loss: torch.Tensor, weight: torch.Tensor | None = None, part: float = 1.0
    ) -> torch.Tensor:
        """Return the loss as its backward takes it: weighted, and scaled for float16.

        Args:
            weight: Weight of this rank's samples, where samples count differently.
            part: Share of this part (a micro-batch) of the rank's batch.
        """
        if self._factor is None:
            share = None if weight is None else self._share_of(weight)
            self._factor = self.accumulations.weigh_backward(share)
        factor = self._factor * part
        scaled = loss if factor == 1.0 else loss * factor
        return scaled if self.scaler is None else self.scaler.scale(scaled)

    def _share_of(self, weight: torch.Tensor) -> float:
        """Return this rank's part of the weight of the global batch. Collective."""
        own = 0.0 if self.is_filler else float(weight)
        total = self.sum_over_data(torch.tensor([own], dtype=torch.float64)).item()
        return own / total if total else 0.0

    def _describe_missing_gradient(self) -> str:
        """Return why a loss has no gradient, and the way out."""
        if self.validation_loop:
            return (
                f"the loss has no gradient, because the validation pass over "
                f"{self.validation_loop} has not ended and disables gradients. HINT: train in "
                "`for batch in world.batches(world.shard(loader))`, which ends the pass, or call "
                "close() on the iterator of the pass before"
            )
        return (
            "the loss has no gradient: it depends on no parameter with requires_grad, or was "
            "computed without gradients. HINT: compute the loss from the model's output, without "
            "torch.no_grad() and detach()"
        )

    def explain(self, error: BaseException) -> str | None:
        """Return the cause of an error of a layout and what to do; None for other errors."""
        found = (model.explain(error) for model in self.models)
        return next((text for text in found if text is not None), None)

    def explain_missing_gradient(self, error: BaseException) -> str | None:
        """Explain the error of a plain ``loss.backward()`` within a validation pass; else None."""
        is_missing = self.validation_loop and "does not require grad" in str(error)
        return self._describe_missing_gradient() if is_missing else None

    def _check_outside_of_batches(self) -> None:
        """Warn about accumulation and sharding that need ``world.batches``, once."""
        if self.accumulations.batch is not None or self._is_outside_checked:
            return
        self._is_outside_checked = True
        numbers = sorted({m.every for m in self.accumulations.models} - {1})
        if numbers:
            self._warn(
                f"accumulate={' and '.join(map(str, numbers))} has no effect outside of "
                f"world.batches ({script_line()}). HINT: for batch in world.batches(loader)"
            )
        loaders = unsharded_loaders_in_use() if self.mesh.data_size > 1 else []
        if loaders:
            self._warn(
                f"each of {self.mesh.data_size} ranks processes all samples of {loaders[0]} "
                f"({script_line()}). HINT: for batch in world.batches(world.shard(loader))"
            )

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Check an optimizer that is about to step, called by ``world.step`` or not."""
        if not self._is_in_step and self._unstepped_backwards:
            self._check_plain_step(optimizer)
        self._distribution_check.check_optimizer(optimizer, self.optimizers)
        self._stepped.add(id(optimizer))

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._unstepped_backwards = 0
        if not self._is_in_step:
            self._used.note_step(parameters_of(optimizer))

    def _check_plain_step(self, optimizer: Optimizer) -> None:
        """Raise ValueError for a plain ``optimizer.step()`` where only ``world.step`` is right."""
        accumulations = self.accumulations.of(optimizer)
        if self.loss_scaling is not None:
            reason = "uses gradients that precision='fp16' has scaled"
        elif not all(model.is_complete for model in accumulations):
            every = max(model.every for model in accumulations)
            reason = f"is inside an accumulation of {every} batches"
        elif any(model.correction != 1.0 for model in accumulations):
            reason = "uses the sum of an uneven accumulation, whose weights are corrected later"
        elif self._rate_factor(optimizer) != 1.0:
            reason = "would leave the learning rate at that of the batch schedule's first size"
        else:
            return
        raise ValueError(
            f"{type(optimizer).__name__}.step() {reason}. HINT: world.step(optimizer) in place "
            "of optimizer.step()"
        )

    def _exchanging(self, group: Any, tensors: Any) -> None:
        """Check gradients that backward is about to reduce."""
        self._check_outside_of_batches()  # in a plain loss.backward()
        self._finite_check.check_before_exchange(tensors)
        if len(tensors) == 1:
            self._distribution_check.note_exchange(tensors[0])
        self.replicas.note_exchange(group)

    def step(self, optimizer: Optimizer, clip: float | None) -> bool:
        """Step an optimizer whose group of batches is complete; return whether it stepped."""
        if clip is not None and not clip > 0:
            raise ValueError(
                f"world.step: clip must be above 0; this is {clip}. HINT: clip=1.0, or clip=None "
                "for no clipping"
            )
        self.step_calls += 1
        accumulations = self.accumulations.of(optimizer)
        if not all(model.is_complete for model in accumulations):
            return False
        if not self._has_gradients(optimizer):
            self._report_no_gradient(optimizer)
            return False
        self._backwards_of[id(optimizer)] = self.backwards
        self.unstepped_loop = ""
        start = now()
        correction = max(accumulations, key=lambda m: m.every).correction if accumulations else 1.0
        if self.loss_scaling is not None:
            self.loss_scaling.before_step(optimizer, unscale=clip is not None or correction != 1.0)
        if correction != 1.0:
            for gradient in gradients_of(optimizer):
                gradient.mul_(correction)
        self._finite_check.check_before_step(optimizer)
        if clip is not None:
            clip_gradients(parameters_of(optimizer), clip, self.mesh, self.models)
        self._is_in_step = True
        try:
            has_stepped = self._step(optimizer)
        finally:
            self._is_in_step = False
        # From clipping to zeroing; the hooks' event of the step itself lies inside.
        self.phases.recorder.event(State.OPTIMIZER, start, now())
        return has_stepped

    def _has_gradients(self, optimizer: Optimizer) -> bool:
        """Return whether a step would change parameters on any rank.

        Where a layout divides models, an optimizer may train parameters of other ranks only: then
        this rank takes part in clipping, and its schedulers advance. It is collective there, in the
        optimizer's first step.
        """
        found = has_gradients(parameters_of(optimizer))
        if not self.mesh.is_divided:
            return found
        if id(optimizer) not in self._stepped:
            return self.any_rank(found)
        is_elsewhere = any(model.is_parted for model in self.models)
        return found or (is_elsewhere and self.backwards > self._backwards_of.get(id(optimizer), 0))

    def _report_no_gradient(self, optimizer: Optimizer) -> None:
        """Report a step without a backward; raises ValueError in the optimizer's first step."""
        message = (
            f"world.step: no parameter of the {type(optimizer).__name__} has a gradient, so it "
            "does not step. HINT: call world.backward(loss) before each world.step(optimizer), "
            "with a loss that uses its parameters"
        )
        if any(m.is_sharded for m in self.models) and not holds_shards(parameters_of(optimizer)):
            message = (
                f"world.step: the {type(optimizer).__name__} was created for whole parameters, "
                "which world.distribute has replaced by shards. HINT: model, optimizer = "
                "world.distribute(model, optimizer, layout=...)"
            )
        if id(optimizer) not in self._stepped:
            raise ValueError(message)
        self._warn(f"{message} ({script_line()})")

    def _step(self, optimizer: Optimizer) -> bool:
        """Step, zero the gradients and advance the optimizer's warm-up."""
        with scaled_rates(optimizer, self._rate_factor(optimizer)):
            if self.loss_scaling is not None:
                self._stepped.add(id(optimizer))
                if not self.loss_scaling.step(optimizer):
                    return False
            else:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        for warmup in self.warmups:
            if warmup.optimizer is optimizer:
                warmup.step()
        return True

    def _rate_factor(self, optimizer: Optimizer) -> float:
        """Return the factor of an optimizer's learning rate in the present step."""
        return math.prod(factor() for known, factor in self.rate_factors if known is optimizer)

    # before a save or a validation

    def prepare_save(self) -> None:
        """Check the previous loss and average local-SGD replicas, before a save. Collective."""
        self.check_previous_loss()
        self.average_replicas(self.optimizers)

    def average_replicas(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """Average models that ranks train independently (local SGD). Collective.

        The state of ``optimizers`` is averaged as well.
        """
        for model in self.models:
            if model.local_sgd is not None:
                model.local_sgd.average(optimizers)

    def check_previous_loss(self) -> None:
        """On a GPU: raise where the previous loss or gradient was not finite."""
        self._finite_check.report_pending()
