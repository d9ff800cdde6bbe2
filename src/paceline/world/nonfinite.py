"""Detection of losses and gradients that are not finite, by rank, step and layer.

A loss is checked before its backward, and gradients where DDP is about to average them: afterwards
they are not finite on any rank, and the rank that caused it is unknown. On a CPU the error is
therefore raised before any rank has stepped. On a GPU nothing waits for the device: results are
copied to the host asynchronously, and read when the next backward begins, before a checkpoint, and
at an epoch's end. Steps that loss scaling skips are not an error, so gradients are not checked
there.

A check is one sum over what is exchanged: 0.1 % of a step of examples/digits.py. Without an
exchange it is the norm of each gradient before the step: 0.6 %.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..parallel.data import is_distributed, unwrap
from ..parallel.sharded.registry import local_part, sharded_of
from ..record.ring.launcher_messages import notify
from ..record.ring.recorder import Recorder

MODES = ("raise", "warn", "ignore")
MAX_WARNINGS = 5  # of one rank
_NO_STEP_TAKEN = (
    "No optimizer has stepped with it; the parameters and the last checkpoint are valid."
)


def validate_mode(option: str, value: str) -> str:
    """Return ``value`` if it is one of MODES. Raises ValueError otherwise."""
    if value not in MODES:
        raise ValueError(
            f"paceline.init: {option} must be one of {', '.join(map(repr, MODES))}; "
            f"this is {value!r}. HINT: {option}={MODES[0]!r}"
        )
    return value


class FiniteCheck:
    """The checks of one rank's losses and gradients."""

    def __init__(self, rank: int, mode: str, recorder: Recorder, models: list[nn.Module]) -> None:
        self.rank, self.mode, self.recorder, self.models = rank, mode, recorder, models
        self.check_gradients = True  # False with loss scaling
        # whether this step's gradients were checked before their exchange
        self._was_checked = False
        self._loss: _PendingFlags | None = None
        self._exchanged: list[_PendingFlags] = []
        self._layers: tuple[_PendingFlags, list[str]] | None = None
        self._step = 0  # step of the pending flags
        self._warnings = 0
        self._parameter_orders: dict[tuple[int, int], list[tuple[str, nn.Parameter]]] = {}

    def check_loss(self, loss: torch.Tensor) -> torch.Tensor | float:
        """Return the loss as a number; on a GPU as a tensor, without synchronization."""
        if self.mode == "ignore":
            return loss.detach()
        if loss.device.type != "cpu":
            self.report_pending()
            self._step = self.recorder.step
            detached = loss.detach()
            self._loss = _PendingFlags(torch.isfinite(detached))
            return detached
        value = float(loss.item())
        if not math.isfinite(value):
            where = f"on rank {self.rank} at step {self.recorder.step}"
            self._report(f"the loss is {value} {where}. {_NO_STEP_TAKEN}")
        return value

    def check_before_exchange(self, tensors: Any) -> None:
        """Check this rank's gradients just before they are averaged."""
        if not self.check_gradients or self.mode == "ignore":
            return
        self._was_checked = self._was_checked or bool(tensors)
        for tensor in tensors:
            if not tensor.is_floating_point() or tensor.is_sparse:
                continue
            wide = torch.promote_types(tensor.dtype, torch.float32)
            total = tensor.detach().sum(dtype=wide)
            if tensor.device.type != "cpu":
                self._exchanged.append(_PendingFlags(torch.isfinite(total)))
            elif not math.isfinite(float(total)) and not bool(torch.isfinite(tensor).all()):
                self._report_gradient(f"on rank {self.rank}", tensor)

    def check_before_step(self, optimizer: Optimizer) -> None:
        """Check the gradients that the optimizer is about to step with."""
        seen, self._was_checked = self._was_checked, False
        on_device = bool(self._exchanged) or self._loss is not None
        if not self.check_gradients or self.mode == "ignore" or (seen and not on_device):
            return
        found = [
            (name, _values(parameter.grad))
            for name, parameter in self._named_parameters(optimizer)
            if parameter.grad is not None
        ]
        if not found:
            return
        norms = torch.stack([n.float() for n in torch._foreach_norm([g for _, g in found])])
        if on_device:
            self._layers = (_PendingFlags(torch.isfinite(norms)), [name for name, _ in found])
        elif not math.isfinite(float(norms.sum())):
            where = "after the average over ranks" if self.models_are_shared else "on rank 0"
            self._report_gradient(where)

    def report_pending(self) -> None:
        """On a GPU: report what was not finite in the previous step."""
        loss, exchanged, layers = self._loss, self._exchanged, self._layers
        self._loss, self._exchanged, self._layers = None, [], None
        where = f"on rank {self.rank} at step {self._step}. The last checkpoint is older."
        if loss is not None and not loss.all_true():
            self._report(f"the loss was not finite {where}")
        elif not all(answer.all_true() for answer in exchanged) or (layers and not exchanged):
            names = layers[0].false_names(layers[1]) if layers else []
            if names or exchanged:
                self._report(f"the gradient{_gradient_owner(names)} was not finite {where}")

    @property
    def models_are_shared(self) -> bool:
        return any(is_distributed(model) for model in self.models)

    def _named_parameters(self, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
        """Return the optimizer's parameters in the order in which backward reaches most of them."""
        key = (id(optimizer), sum(len(group["params"]) for group in optimizer.param_groups))
        if key not in self._parameter_orders:
            names = {id(p): name for name, p in named_parameters(self.models)}
            groups = [p for group in optimizer.param_groups for p in group["params"]]
            self._parameter_orders[key] = [
                (names.get(id(p), "a parameter"), p) for p in reversed(groups)
            ]
        return self._parameter_orders[key]

    def _report_gradient(self, where: str, exchanged: torch.Tensor | None = None) -> None:
        names = [
            name
            for name, parameter in reversed(named_parameters(self.models))
            if parameter.grad is not None
            and not bool(torch.isfinite(_values(parameter.grad)).all())
        ]
        if exchanged is not None:
            names = [
                name
                for sharded in filter(None, map(sharded_of, self.models))
                for name in sharded.name_nonfinite(exchanged)
            ] or names
        step = self.recorder.step
        self._report(
            f"the gradient{_gradient_owner(names)} is not finite {where} at step {step}. "
            f"{_NO_STEP_TAKEN}"
        )

    def _report(self, what: str) -> None:
        if self.mode == "raise":
            raise ValueError(
                f"{what} HINT: lower the learning rate, add a warm-up, set clip=1.0 in world.step, "
                "or check the samples of this batch"
            )
        self._warnings += 1
        if self._warnings <= MAX_WARNINGS:
            what = what.replace(f" {_NO_STEP_TAKEN}", "")
            last = (
                " This rank prints no further warnings of this kind."
                if self._warnings == MAX_WARNINGS
                else ""
            )
            notify(f"paceline: warning: {what}{last}\n")


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient; of a sparse one the stored values."""
    part = local_part(gradient)
    return part._values() if part.is_sparse else part


class _PendingFlags:
    """Booleans that are being copied from a device to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.host, self.event = tensor, None
        if tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # in a graph the value can't be known
            self.host = torch.ones(tensor.shape, dtype=torch.bool)
        elif tensor.device.type == "cuda":
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.host.copy_(tensor, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def _arrived(self) -> torch.Tensor:
        if self.event is not None:
            self.event.synchronize()
        return self.host

    def all_true(self) -> bool:
        return bool(self._arrived().all())

    def false_names(self, names: list[str]) -> list[str]:
        return [n for n, well in zip(names, self._arrived().tolist(), strict=True) if not well]


def named_parameters(models: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that the models train, with the names that the script uses for them."""
    found = []
    for i, model in enumerate(models):
        of = f"model {i + 1}'s " if len(models) > 1 else ""
        left_out = getattr(model, "parameters_to_ignore", ())
        sharded = sharded_of(model)
        # names and parameters as optimizers hold them; within a forward the module has others
        named = sharded.shards if sharded is not None else dict(unwrap(model).named_parameters())
        for name, parameter in named.items():
            if parameter.requires_grad and name not in left_out:
                found.append((of + name, parameter))
    return found


def _gradient_owner(names: list[str]) -> str:
    """Name the first parameter that backward reached; later ones have inherited its values."""
    more = len(names) - 1
    below = f" (and of {more} more, which the backward reaches later)" if more > 0 else ""
    return f" of {names[0]}{below}" if names else ""
