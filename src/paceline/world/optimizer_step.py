"""The optimizer step: weights of uneven batches, accumulation, mixed precision, clipping."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..data.sampling.sample_order import BatchShare
from ..parallel.data import set_gradient_sync
from ..record.hooks.phases import PhaseRecorder
from ..record.ring.recorder import now
from ..record.ring.states import State
from .nonfinite import FiniteCheck, validate_mode
from .replicas import ReplicaDivergenceCheck


class OptimizerSteps:
    """Models and optimizers of one rank, and the state of their current step."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        precision: torch.dtype | None,
        phases: PhaseRecorder,
        nonfinite: str,
        replicas: str,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.phases = phases
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.warmups: list[LRScheduler] = []
        self.accumulate = 1
        self.scaler = torch.amp.GradScaler(device.type) if precision is torch.float16 else None
        self.share: BatchShare | None = None  # of the current batch
        self.weight = 1.0  # of the current batch's loss
        self.syncs_gradients = True  # whether this micro-batch is the last of its step
        self.backwards = 0  # number of backwards since the batch began
        self.last_loss: torch.Tensor | float | None = None
        self.last_total = 0  # samples of the last batch over all ranks
        # assumed samples of a group whose true number is known only at its end, else 0
        self._assumed_group_samples = 0.0
        self._group_samples = 0
        recorder = phases.recorder
        self._finite_check = FiniteCheck(
            rank, validate_mode("nonfinite", nonfinite), recorder, self.models
        )
        self._finite_check.check_gradients = self.scaler is None  # loss scaling skips such steps
        self.replicas = ReplicaDivergenceCheck(
            rank, size, validate_mode("replicas", replicas), recorder, self.models
        )
        recorder.on_backward_reduce = self._exchanging

    # one batch

    def begin(self, share: BatchShare, group_total: int | None, nominal: int) -> None:
        """Start a batch of the training loop.

        ``group_total``: samples accumulated with it over all ranks; None where unknown, then
        ``nominal`` samples per batch are assumed.
        """
        self.share = share
        self.backwards = 0
        self.last_total = share.total
        total = group_total if group_total is not None else nominal * self.accumulate
        count = 0 if share.filler else share.count
        # DDP averages ranks equally; the weight makes that the mean over the true samples.
        self.weight = self.size * count / total
        self._group_samples += share.total
        self._assumed_group_samples = total if group_total is None else 0.0
        group_ends = (share.position + 1) % self.accumulate == 0
        self.syncs_gradients = group_ends or share.last
        for model in self.models:
            set_gradient_sync(model, self.syncs_gradients)
        self.phases.recorder.samples += count

    def end(self) -> None:
        """End the batch of the training loop."""
        if self.syncs_gradients:
            self._group_samples = 0
        self.share, self.weight, self.syncs_gradients = None, 1.0, True

    @property
    def between_steps(self) -> bool:
        """Whether no micro-batch's gradient waits for its step."""
        return self._group_samples == 0

    # the user's two calls

    def backward(self, loss: torch.Tensor) -> None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(
                f"world.backward takes the batch's mean loss, one number, and got {shape}. "
                "HINT: loss.mean()"
            )
        start = self.phases.backward_starts()
        self.last_loss = self._finite_check.check_loss(loss)
        self.backwards += 1
        scaled = loss if self.weight == 1.0 else loss * self.weight
        if self.scaler is not None:
            scaled = self.scaler.scale(scaled)
        try:
            scaled.backward()
        finally:
            self.phases.recorder.event(State.BACKWARD, start, now())
        self.replicas.after_backward()

    def _exchanging(self, group: Any, tensors: Any) -> None:
        """Check gradients that backward is about to reduce."""
        self._finite_check.check_before_exchange(tensors)
        self.replicas.note_exchange(group)

    def step(self, optimizer: Optimizer, clip: float | None) -> bool:
        if not self.syncs_gradients:
            return False
        start = now()
        if self.scaler is not None and (clip is not None or self._assumed_group_samples):
            self.scaler.unscale_(optimizer)
        self._correct_weights(optimizer)
        self._finite_check.check_before_step(optimizer)
        if clip is not None:
            if not clip > 0:
                raise ValueError(f"world.step: clip={clip} is not above 0. HINT: clip=None")
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, clip)
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if optimizer is self.optimizers[0]:
            for warmup in self.warmups:
                warmup.step()
        # From clipping to zeroing; the hooks' event of the step itself lies inside.
        self.phases.recorder.event(State.OPTIMIZER, start, now())
        return True

    def _correct_weights(self, optimizer: Optimizer) -> None:
        """Rescale gradients where the true number of samples of a group differs from the assumed
        one.
        """
        if not self._assumed_group_samples or self._group_samples == self._assumed_group_samples:
            return
        factor = self._assumed_group_samples / self._group_samples
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def check_previous_loss(self) -> None:
        """On a GPU: raise where the previous loss or gradient was not finite."""
        self._finite_check.report_pending()


def is_filler(share: BatchShare | None) -> bool:
    """Whether the batch only keeps the ranks in step: a repeated sample of weight zero."""
    return share is not None and share.filler
