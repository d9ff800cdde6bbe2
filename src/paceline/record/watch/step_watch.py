"""Send the loss of each optimizer step to the launcher, which holds it against a reference.

``paceline run --reference`` sets the environment variable ``PACELINE_GUARD``: "1", or "each" to
send every step at once, where the launcher assigns lines of the output to steps. A step's loss is
the mean of the losses whose backward ran since the previous step. On a GPU nothing waits for the
device: values are sent when they have arrived.
"""

import atexit
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from ..hooks import taps
from ..hooks.hook_failures import noting, report_failure
from ..pending_value import PendingValue, is_capturing
from ..ring.launcher_messages import send_to_launcher
from ..ring.recorder import Recorder

# A checksum of parameters, by which ranks see whether they hold the same ones.


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 1_000_003  # so that parameters that are exchanged change the sum


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a plain one, and not a rank's part of a sharded parameter."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_sparse


def parameter_bits(parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the sum of the bits of parameters as one int64; None without a whole parameter."""
    total: torch.Tensor | None = None
    for parameter in parameters:
        if not is_whole(parameter) or not parameter.numel():
            continue
        tensor = parameter.detach()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        aligned = tensor.is_contiguous() and tensor.data_ptr() % 8 == 0
        if aligned and tensor.nbytes % 8 == 0:  # ten times as fast as widening each element
            tensor = tensor.flatten().view(torch.int64)
        bits = tensor.view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
        if total is not None and total.device != bits.device:
            bits = bits.to(total.device)
        total = bits if total is None else total * _FACTOR + bits
    return total


VARIABLE = "PACELINE_GUARD"
EACH = "each"
SEND_INTERVAL_S = 0.1
MAX_WAITING = 256  # steps whose values have not arrived; older ones are waited for
MAX_SHAPES = 64  # of parameters, sent to the launcher
BITS_INTERVAL = 4  # steps between two checksums of the parameters, at least
MAX_BITS_INTERVAL = 64
BITS_COST = 0.02  # of the time of the steps between, at most
_HOOK = "the guard"


@dataclass
class _Step:
    """The values of one step. Attributes: those of ``launch.guard.rows.Row``."""

    step: int
    seen: int
    count: int
    losses: list[PendingValue]
    rate: PendingValue | None
    norm: PendingValue | None
    bits: PendingValue | None

    @property
    def is_known(self) -> bool:
        return all(
            value.is_known for value in (*self.losses, self.rate, self.norm, self.bits) if value
        )

    def row(self) -> list[Any]:
        losses = [float(loss.read()) for loss in self.losses]
        return [
            *(self.step, self.seen, self.count),
            sum(losses) / len(losses) if losses else None,
            float(self.rate.read()) if self.rate is not None else None,
            float(self.norm.read()) if self.norm is not None else None,
            int(self.bits.read()) if self.bits is not None else None,
        ]


@dataclass
class StepWatch:
    """The values of the steps of one rank.

    Attributes:
        ignores_backward: Whether ``world.backward`` runs, which has passed its loss and scales it.
        seen: Samples of this rank in all steps. A run that resumes at step N counts N steps of the
            size of its first one.
    """

    recorder: Recorder
    sends_each: bool
    ignores_backward: bool = False
    seen: int = 0
    _losses: list[PendingValue] = field(default_factory=list)
    _norms: list[torch.Tensor] = field(default_factory=list)
    _optimizers: list[Optimizer] = field(default_factory=list)
    _waiting: deque[_Step] = field(default_factory=deque)
    _rate: PendingValue | None = None
    _last_sent: float = 0.0
    _model_sent: bool = False
    _steps: int = 0
    _last_step: float = 0.0
    _bits_interval: int = BITS_INTERVAL
    _bits_s: float = math.inf
    _bits_due: int = 0  # step from which the next checksum is due

    def install(self) -> None:
        """Hook torch's backward, gradient scaler and optimizers in this process."""
        taps.on_loss(self._on_loss)
        taps.on_step(before=self._before_step)
        atexit.register(self.flush)

    def note_loss(self, loss: Any) -> None:
        """Note a loss whose backward runs."""
        if is_capturing():
            return
        if isinstance(loss, torch.Tensor):
            if loss.numel() == 1 and loss.is_floating_point():
                self._losses.append(PendingValue(loss))
        else:
            self._losses.append(PendingValue(torch.tensor(float(loss))))

    def note_logged(self, values: dict[str, Any]) -> None:
        """Send the numbers among the values of ``world.log``."""
        numbers = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, (int, float)):
                numbers[name] = float(value)
        if numbers:
            self.flush()  # steps come before what is logged after them
            send_to_launcher(logged=numbers, step=self.recorder.step, seen=self.seen)

    @noting(_HOOK)
    def after_step(self, samples: int) -> None:
        """Note the end of an optimizer step that trained ``samples`` samples on this rank."""
        if is_capturing():
            return
        step, now = self.recorder.step, time.monotonic()
        if not self._steps:
            self.seen = max(step - 1, 0) * samples
        self._steps += 1
        self.seen += samples
        norm = _total_norm(self._norms) if self._norms else None
        bits = self._checksum(step, now - self._last_step if self._last_step else 0.0)
        self._last_step = time.monotonic()
        pending_norm = PendingValue(norm) if norm is not None else None
        place = (step, self.seen, samples)
        self._waiting.append(_Step(*place, self._losses, self._rate, pending_norm, bits))
        self._losses, self._norms, self._rate = [], [], None
        if not self._model_sent:
            self._send_model()
        if self.sends_each or now - self._last_sent >= SEND_INTERVAL_S:
            self._last_sent = now
            self._send(MAX_WAITING)

    def _checksum(self, step: int, step_s: float) -> PendingValue | None:
        if step < self._bits_due:
            return None
        start = time.monotonic()
        total = parameter_bits(taps.parameters_of(*self._optimizers))
        # the shortest one: others may have waited for a core
        self._bits_s = min(self._bits_s, time.monotonic() - start)
        if step_s > 0:
            wanted = int(self._bits_s / (BITS_COST * step_s))
            self._bits_interval = max(BITS_INTERVAL, min(wanted, MAX_BITS_INTERVAL))
        # all ranks at the same steps: those divisible by a power of two
        interval = 1 << (self._bits_interval - 1).bit_length()
        self._bits_due = (step // interval + 1) * interval
        return PendingValue(total) if total is not None else None

    def _send_model(self) -> None:
        self._model_sent = True
        parameters = taps.parameters_of(*self._optimizers)
        send_to_launcher(
            model={
                "shapes": [list(p.shape) for p in parameters[:MAX_SHAPES]],
                "tensors": len(parameters),
                "elements": sum(p.numel() for p in parameters),
                "sharded": not all(map(is_whole, parameters)),
            }
        )

    def _send(self, max_waiting: int) -> None:
        rows = []
        while self._waiting and (len(self._waiting) > max_waiting or self._waiting[0].is_known):
            rows.append(self._waiting.popleft().row())
        if rows:
            send_to_launcher(steps=rows)

    def flush(self) -> None:
        """Send everything, and wait for it if necessary."""
        try:
            self._send(0)
        except Exception as error:  # a device that has failed
            report_failure(_HOOK, error)

    # Hooks

    @noting(_HOOK)
    def _on_loss(self, loss: torch.Tensor) -> None:
        if not self.ignores_backward:
            self.note_loss(loss)

    @noting(_HOOK)
    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if is_capturing():
            return
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        if self._rate is None:
            rate = optimizer.param_groups[0]["lr"]
            self._rate = PendingValue(torch.as_tensor(rate, dtype=torch.float64))
        each = (parameter.grad for parameter in taps.parameters_of(optimizer))
        gradients = [grad for grad in each if grad is not None and is_whole(grad)]
        if gradients:
            self._norms.append(_total_norm(torch._foreach_norm(gradients)))


def _total_norm(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of norms as float32, on the device of the first one."""
    device = norms[0].device
    same = [norm.to(device=device, dtype=torch.float32) for norm in norms]
    total: torch.Tensor = torch.stack(same).norm()
    return total


def install(recorder: Recorder) -> None:
    """Watch the steps of this process, if ``paceline run`` asks for it."""
    value = os.environ.get(VARIABLE)
    if value:
        watch = StepWatch(recorder, value == EACH)
        watch.install()
        recorder.step_watch = watch
