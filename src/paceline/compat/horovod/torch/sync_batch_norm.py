"""Batch normalization over the samples of all ranks, under Horovod's name."""

import torch

from ....optim.norms import Exchange, GlobalBatchNorm
from .mpi_ops import Sum, allgather, allreduce, size


class SyncBatchNorm(GlobalBatchNorm):
    """Batch normalization whose mean and variance are those of the samples of all ranks.

    Arguments as for ``torch.nn.BatchNorm2d``; inputs have shape (samples, channels, ...).
    """

    exchanges_always = True

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        # Not numbered: a rank may have built other models before. Calls of a layer wait for their
        # result, so that no name is in use twice.
        self._exchange = _NamedExchange(f"sync_batch_norm.{num_features}")

    def exchange(self) -> Exchange | None:
        return None if size() == 1 else self._exchange


class _NamedExchange:
    """Horovod's operations, which are matched by name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        return allgather(row.unsqueeze(0), name=f"{self._name}.forward")

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return allreduce(tensor, op=Sum, name=f"{self._name}.backward")
