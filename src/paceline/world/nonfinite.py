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

from ..optim.whole_norms import local_part
from ..parallel.mesh import Mesh
from ..parallel.strategy.distributed_model import DistributedModel
from ..record.pending_value import PendingCopy, is_capturing
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

    def __init__(
        self, mesh: Mesh, mode: str, recorder: Recorder, models: list[DistributedModel]
    ) -> None:
        self.mesh, self.mode, self.recorder, self.models = mesh, mode, recorder, models
        self.check_gradients = True  # False with loss scaling
        # whether this step's gradients were checked before their exchange
        self._was_checked = False
        self._loss: PendingCopy | None = None
        self._exchanged: list[PendingCopy] = []
        self._layers: tuple[PendingCopy, list[str]] | None = None
        self._step = 0  # step of the pending flags
        self._warnings = 0
        self._parameter_orders: dict[tuple[int, int], list[tuple[str, nn.Parameter]]] = {}

    def check_loss(self, loss: torch.Tensor) -> torch.Tensor | float:
        """Return the loss as a number; on a GPU as a tensor, without synchronization."""
        if self.mode == "ignore":
            return loss.detach()
        if loss.device.type != "cpu":
            detached = loss.detach()
            if not is_capturing():
                self.report_pending()
                self._step = self.recorder.step
                self._loss = PendingCopy(torch.isfinite(detached))
            return detached
        value = float(loss.item())
        if not math.isfinite(value):
            where = f"on {self.mesh.name()} at step {self.recorder.step}"
            self._report(f"the loss is {value} {where}. {_NO_STEP_TAKEN}")
        return value

    def check_before_exchange(self, tensors: Any) -> None:
        """Check this rank's gradients just before they are averaged."""
        if not self.check_gradients or self.mode == "ignore" or is_capturing():
            return
        self._was_checked = self._was_checked or bool(tensors)
        for tensor in tensors:
            if not tensor.is_floating_point() or tensor.is_sparse or not tensor.numel():
                continue
            if tensor.device.type != "cpu":
                self._exchanged.append(PendingCopy(finite_flags([tensor.detach()])))
                continue
            wide = torch.promote_types(tensor.dtype, torch.float32)
            total = tensor.detach().sum(dtype=wide)
            if not math.isfinite(float(total)) and not bool(torch.isfinite(tensor).all()):
                self._report_gradient(f"on {self.mesh.name()}", tensor)

    def check_before_step(self, optimizer: Optimizer) -> None:
        """Check the gradients that the optimizer is about to step with."""
        seen, self._was_checked = self._was_checked, False
        on_device = bool(self._exchanged) or self._loss is not None
        if not self.check_gradients or self.mode == "ignore" or (seen and not on_device):
            return
        if is_capturing():
            return
        found = [
            (name, _values(parameter.grad))
            for name, parameter in self._named_parameters(optimizer)
            if parameter.grad is not None and _values(parameter.grad).numel()
        ]
        if not found:
            return
        gradients = [gradient for _, gradient in found]
        if on_device:
            names = [name for name, _ in found]
            self._layers = (PendingCopy(finite_flags(gradients)), names)
            return
        norms = torch.stack([n.float() for n in torch._foreach_norm(gradients)])
        # a norm may be infinite where the gradient is not
        if not math.isfinite(float(norms.sum())) and not bool(finite_flags(gradients).all()):
            where = (
                "after the average over ranks"
                if self.models_are_shared
                else f"on {self.mesh.name()}"
            )
            self._report_gradient(where)

    def report_pending(self) -> None:
        """On a GPU: report what was not finite in the previous step."""
        loss, exchanged, layers = self._loss, self._exchanged, self._layers
        self._loss, self._exchanged, self._layers = None, [], None
        where = f"on {self.mesh.name()} at step {self._step}. The last checkpoint is older."
        if loss is not None and not bool(loss.wait().all()):
            self._report(f"the loss was not finite {where}")
        elif not all(bool(flag.wait().all()) for flag in exchanged) or (layers and not exchanged):
            names = _false_names(*layers) if layers else []
            if names or exchanged:
                self._report(f"the gradient{_gradient_owner(names)} was not finite {where}")

    @property
    def models_are_shared(self) -> bool:
        return any(model.is_distributed for model in self.models)

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
            names = [n for model in self.models for n in model.name_nonfinite(exchanged)] or names
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


def finite_flags(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return whether each tensor is finite, as booleans on the device of the first one.

    The largest absolute value is not finite only where an element is not: sums and norms may
    overflow. No tensor is empty.
    """
    largest = list(torch._foreach_norm(tensors, float("inf")))
    first = largest[0]
    if all((one.device, one.dtype) == (first.device, first.dtype) for one in largest):
        return torch.stack(largest).isfinite()
    return torch.stack([one.isfinite().to(first.device) for one in largest])


def _false_names(flags: PendingCopy, names: list[str]) -> list[str]:
    return [name for name, well in zip(names, flags.wait().tolist(), strict=True) if not well]


def named_parameters(models: list[DistributedModel]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that the models train, with the names that the script uses for them."""
    return [(name, parameter) for name, parameter, _, _ in owned_parameters(models)]


def owned_parameters(
    models: list[DistributedModel],
) -> list[tuple[str, nn.Parameter, DistributedModel, str]]:
    """Return ``named_parameters``, each with its model and its name there."""
    found = []
    for i, model in enumerate(models):
        of = f"model {i + 1}'s " if len(models) > 1 else ""
        left_out = model.ignored_parameters
        for name, parameter in model.parameters().items():
            if parameter.requires_grad and name not in left_out:
                found.append((of + name, parameter, model, name))
    return found


def _gradient_owner(names: list[str]) -> str:
    """Name the first parameter that backward reached; later ones have inherited its values."""
    more = len(names) - 1
    below = f" (and of {more} more, which the backward reaches later)" if more > 0 else ""
    return f" of {names[0]}{below}" if names else ""
