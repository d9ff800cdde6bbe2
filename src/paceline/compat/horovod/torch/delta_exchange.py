"""Adasum of the updates of the ranks' own steps.

Each rank steps with its own gradients; the differences to the parameters before are combined. So
Adasum sees updates that contain the learning rate and the momentum.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from .mpi_ops import Adasum, allreduce_async_, synchronize
from .named_parameters import parameters_of


class DeltaExchange:
    """The step of an optimizer with ``op=Adasum``."""

    def __init__(
        self, optimizer: Optimizer, names: dict[torch.Tensor, str], compression: Any
    ) -> None:
        self._optimizer, self._names, self._compression = optimizer, names, compression

    @torch.no_grad()
    def step(self, own_step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """Step on this rank, and replace the update by the Adasum of all ranks' updates."""
        trained = [one for one in parameters_of(self._optimizer) if one.requires_grad]
        starts = [one.detach().clone() for one in trained]
        loss = own_step(closure)
        sent = []
        for number, (parameter, start) in enumerate(zip(trained, starts, strict=True)):
            name = self._names.get(parameter, f"allreduce.noname.{number}")
            tensor, context = self._compression.compress(parameter.detach() - start)
            sent.append((allreduce_async_(tensor, op=Adasum, name=f"delta.{name}"), context))
        for parameter, start, (handle, context) in zip(trained, starts, sent, strict=True):
            update = self._compression.decompress(synchronize(handle), context)
            parameter.copy_(start.add_(update))
        return loss
