"""Losses and gradients that are not finite: named by rank, step and layer.

A loss is looked at before its backward, and gradients where DDP is about to average them: after
that they are not finite on any rank, and nobody knows whose they were. So on a CPU nobody has
stepped with them when it is told. On a GPU nothing waits for the device: answers are copied to
the host beside what runs, and read when the next backward begins, before a checkpoint, and at an
epoch's end. Steps that loss scaling skips are no error, so gradients are not looked at there.

A look is one sum over what is exchanged: 0.1 % of a step of examples/digits.py. Where nothing is
exchanged it is the norm of each gradient before the step: 0.6 %.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..parallel.data import plain
from ..record.ring.launcher_messages import notify
from ..record.ring.recorder import Recorder

MODES = ("raise", "warn", "ignore")
MOST = 5  # warnings of one rank
_UNTOUCHED = "No rank has stepped with it: parameters and the last checkpoint are as they were."


def mode(option: str, value: str) -> str:
    if value not in MODES:
        raise ValueError(f"paceline.init: {option}={value!r} is not known. HINT: one of {MODES}")
    return value


class Finite:
    """What one rank knows of its losses and gradients."""

    def __init__(self, rank: int, mode: str, recorder: Recorder, models: list[nn.Module]) -> None:
        self.rank, self.mode, self.recorder, self.models = rank, mode, recorder, models
        self.gradients = True  # False with loss scaling
        self._seen = False  # whether this step's gradients were looked at before their exchange
        self._loss: _Answer | None = None
        self._exchanged: list[_Answer] = []
        self._layers: tuple[_Answer, list[str]] | None = None
        self._step = 0  # that these answers are of
        self._warned = 0
        self._orders: dict[tuple[int, int], list[tuple[str, nn.Parameter]]] = {}

    def loss(self, loss: torch.Tensor) -> torch.Tensor | float:
        """The loss as a number, on a GPU as a tensor that nobody has waited for."""
        if self.mode == "ignore":
            return loss.detach()
        if loss.device.type != "cpu":
            self.settle()
            self._step = self.recorder.step
            detached = loss.detach()
            self._loss = _Answer(torch.isfinite(detached))
            return detached
        value = float(loss.item())
        if not math.isfinite(value):
            where = f"on rank {self.rank} at step {self.recorder.step}"
            self._tell(f"the loss is {value} {where}. {_UNTOUCHED}")
        return value

    def exchanging(self, tensors: Any) -> None:
        """This rank's own gradients, just before they are averaged."""
        if not self.gradients or self.mode == "ignore":
            return
        self._seen = self._seen or bool(tensors)
        for tensor in tensors:
            if not tensor.is_floating_point() or tensor.is_sparse:
                continue
            wide = torch.promote_types(tensor.dtype, torch.float32)
            total = tensor.detach().sum(dtype=wide)
            if tensor.device.type != "cpu":
                self._exchanged.append(_Answer(torch.isfinite(total)))
            elif not math.isfinite(float(total)) and not bool(torch.isfinite(tensor).all()):
                self._tell_gradient(f"on rank {self.rank}")

    def stepping(self, optimizer: Optimizer) -> None:
        """The gradients that the optimizer is about to step with."""
        seen, self._seen = self._seen, False
        on_device = bool(self._exchanged) or self._loss is not None
        if not self.gradients or self.mode == "ignore" or (seen and not on_device):
            return
        found = [(n, p.grad) for n, p in self._named(optimizer) if p.grad is not None]
        if not found:
            return
        norms = torch.stack([n.float() for n in torch._foreach_norm([g for _, g in found])])
        if on_device:
            self._layers = (_Answer(torch.isfinite(norms)), [name for name, _ in found])
        elif not math.isfinite(float(norms.sum())):
            where = "after the average over ranks" if self.models_are_shared else "on rank 0"
            self._tell_gradient(where)

    def settle(self) -> None:
        """On a GPU: what is known by now of the previous step."""
        loss, exchanged, layers = self._loss, self._exchanged, self._layers
        self._loss, self._exchanged, self._layers = None, [], None
        where = f"on rank {self.rank} at step {self._step}. The last checkpoint is from before it."
        if loss is not None and not loss.true():
            self._tell(f"the loss was not finite {where}")
        elif not all(answer.true() for answer in exchanged) or (layers and not exchanged):
            names = layers[0].false(layers[1]) if layers else []
            if names or exchanged:
                self._tell(f"the gradient{_of(names)} was not finite {where}")

    @property
    def models_are_shared(self) -> bool:
        return any(plain(model) is not model for model in self.models)

    def _named(self, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
        """The optimizer's parameters in the order in which a backward comes to most of them."""
        key = (id(optimizer), sum(len(group["params"]) for group in optimizer.param_groups))
        if key not in self._orders:
            names = {id(p): name for name, p in named(self.models)}
            groups = [p for group in optimizer.param_groups for p in group["params"]]
            self._orders[key] = [(names.get(id(p), "a parameter"), p) for p in reversed(groups)]
        return self._orders[key]

    def _tell_gradient(self, where: str) -> None:
        names = [
            name
            for name, parameter in reversed(named(self.models))
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
        ]
        step = self.recorder.step
        self._tell(f"the gradient{_of(names)} is not finite {where} at step {step}. {_UNTOUCHED}")

    def _tell(self, what: str) -> None:
        if self.mode == "raise":
            raise ValueError(
                f"{what} HINT: a lower learning rate or a warm-up, clip=1.0 in world.step, or a "
                "look at this batch"
            )
        self._warned += 1
        if self._warned <= MOST:
            what = what.replace(f" {_UNTOUCHED}", "")
            last = " No more is said of such on this rank." if self._warned == MOST else ""
            notify(f"paceline: warning: {what}{last}\n")


class _Answer:
    """Booleans on their way from a device to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.host, self.event = tensor, None
        if tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.host = torch.ones(tensor.shape, dtype=torch.bool)  # nobody can know in a graph
        elif tensor.device.type == "cuda":
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.host.copy_(tensor, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def _arrived(self) -> torch.Tensor:
        if self.event is not None:
            self.event.synchronize()
        return self.host

    def true(self) -> bool:
        return bool(self._arrived().all())

    def false(self, names: list[str]) -> list[str]:
        return [n for n, well in zip(names, self._arrived().tolist(), strict=True) if not well]


def named(models: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """The parameters that the models train, with the names that the script knows them by."""
    found = []
    for i, model in enumerate(models):
        of = f"model {i + 1}'s " if len(models) > 1 else ""
        left_out = getattr(model, "parameters_to_ignore", ())
        for name, parameter in plain(model).named_parameters():
            if parameter.requires_grad and name not in left_out:
                found.append((of + name, parameter))
    return found


def _of(names: list[str]) -> str:
    """The first that the backward came to, which those below it have theirs from."""
    more = len(names) - 1
    below = f" (and of {more} more that come after it in the backward)" if more > 0 else ""
    return f" of {names[0]}{below}" if names else ""
