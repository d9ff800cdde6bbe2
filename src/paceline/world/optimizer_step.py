"""The step: weights of uneven batches, accumulation, mixed precision, clipping."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..data.sampling.sample_order import BatchShare
from ..parallel.data import set_exchange
from ..record.hooks.phases import PhaseRecorder
from ..record.ring.recorder import now
from ..record.ring.states import State
from .nonfinite import Finite, mode
from .replicas import Replicas


class Training:
    """Models and optimizers of one rank, and what one step of them takes."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        precision: torch.dtype | None,
        p: PhaseRecorder,
        nonfinite: str,
        replicas: str,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.phases = p
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.warmups: list[LRScheduler] = []
        self.accumulate = 1
        self.scaler = torch.amp.GradScaler(device.type) if precision is torch.float16 else None
        self.share: BatchShare | None = None  # of the batch that is in the loop's body now
        self.weight = 1.0  # of its loss
        self.exchanges = True  # whether this micro-batch is the last of its step
        self.backwards = 0  # since the batch began
        self.last_loss: torch.Tensor | float | None = None
        self.last_total = 0  # samples of the newest batch over all ranks
        self._unsettled = 0.0  # samples x weight of a group whose true sum is known at its end
        self._group_samples = 0
        recorder = p.recorder
        self._finite = Finite(rank, mode("nonfinite", nonfinite), recorder, self.models)
        self._finite.gradients = self.scaler is None  # steps that it skips are no error
        self.replicas = Replicas(rank, size, mode("replicas", replicas), recorder, self.models)
        recorder.on_backward_reduce = self._exchanging

    # one batch

    def begin(self, share: BatchShare, group_total: int | None, nominal: int) -> None:
        """A batch enters the loop's body. ``group_total``: samples accumulated with it over all
        ranks, None where not known yet (``nominal`` samples a batch are assumed until then)."""
        self.share = share
        self.backwards = 0
        self.last_total = share.total
        total = group_total if group_total is not None else nominal * self.accumulate
        count = 0 if share.filler else share.count
        # DDP averages ranks equally; this makes it the mean over the true samples.
        self.weight = self.size * count / total
        self._group_samples += share.total
        self._unsettled = total if group_total is None else 0.0
        group_ends = (share.position + 1) % self.accumulate == 0
        self.exchanges = group_ends or share.last
        for model in self.models:
            set_exchange(model, self.exchanges)
        self.phases.recorder.samples += count

    def end(self) -> None:
        """The loop's body is done with the batch."""
        if self.exchanges:
            self._group_samples = 0
        self.share, self.weight, self.exchanges = None, 1.0, True

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
        self.last_loss = self._finite.loss(loss)
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
        """A backward is about to reduce these gradients."""
        self._finite.exchanging(tensors)
        self.replicas.exchanging(group)

    def step(self, optimizer: Optimizer, clip: float | None) -> bool:
        if not self.exchanges:
            return False
        start = now()
        if self.scaler is not None and (clip is not None or self._unsettled):
            self.scaler.unscale_(optimizer)
        self._settle(optimizer)
        self._finite.stepping(optimizer)
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

    def _settle(self, optimizer: Optimizer) -> None:
        """Rescale gradients where the group's true sum of samples differs from the assumed."""
        if not self._unsettled or self._group_samples == self._unsettled:
            return
        factor = self._unsettled / self._group_samples
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def check_previous_loss(self) -> None:
        """On a GPU: raise where the previous loss or gradient was not finite."""
        self._finite.settle()


def weightless(share: BatchShare | None) -> bool:
    """Whether the batch is there only to keep step: a repeated sample of weight zero."""
    return share is not None and share.filler
