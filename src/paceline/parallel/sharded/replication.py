"""Rank 0's parameters and buffers on all ranks, before sharding and before each forward."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.distributed.utils import _sync_module_states

from ...record.hooks.phases import UncopiedHook
from ..replicated.replica import BROADCAST_BYTES


def broadcast_model(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all ranks of the group its first rank's parameters and buffers.

    Tensors without memory are left out.
    """
    without = {name for name, tensor in _tensors(model) if tensor.device.type == "meta"}
    _sync_module_states(model, group, BROADCAST_BYTES, 0, without)


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


class BufferSync:
    """Broadcast rank 0's buffers before each forward, as DistributedDataParallel does.

    Attributes:
        enabled: Whether forwards do so.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.enabled = True
        self._model, self._group = model, group
        if any(True for _ in model.buffers()):
            model.register_forward_pre_hook(UncopiedHook(self._before_forward), prepend=True)

    def set(self, enabled: bool) -> None:
        """Set whether forwards broadcast; disabling broadcasts one last time."""
        if self.enabled and not enabled:
            self.broadcast()
        self.enabled = enabled

    def broadcast(self) -> None:
        buffers = [buffer for buffer in self._model.buffers() if buffer.numel()]
        if buffers:
            _broadcast_coalesced(self._group, buffers, BROADCAST_BYTES, 0)

    def _before_forward(self, *_: Any) -> None:
        if self.enabled:
            with torch.no_grad():
                self.broadcast()
