"""Batch normalization in a pipeline: by micro-batch, with running statistics of the whole batch.

As torchgpipe's deferred batch normalization. Normalizing with the whole batch would need all
micro-batches at a layer before the first one could leave it.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ....optim.norms import next_factor
from ....record.hooks.phases import UncopiedHook
from ...divided.divided_tensor import whole_outputs
from ...tensor.split_tensor import SplitTensor, piece_at
from ...tensor.splits import Split


def is_deferred(model: nn.Module, name: str) -> bool:
    """Return whether a buffer has running statistics that change once for a batch."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return isinstance(owner, _BatchNorm) and name.rpartition(".")[2] in owner._buffers


class DeferredNorms:
    """The batch normalization layers of a stage.

    A layer that a forward calls several times updates its statistics as often.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = [
            layer
            for layer in module.modules()
            if isinstance(layer, _BatchNorm) and layer.track_running_stats
        ]
        self._is_collecting = False
        self._sums: dict[_BatchNorm, list[_Sums]] = {}  # of each call in a forward
        self._calls: Counter[_BatchNorm] = Counter()
        for layer in self._layers:
            layer.register_forward_pre_hook(UncopiedHook(self._collect))

    def begin(self) -> None:
        """Begin a batch: layers in training leave their running statistics unchanged."""
        self._sums = {layer: [] for layer in self._layers if layer.training}
        for layer in self._sums:
            layer.track_running_stats = False

    def end(self, is_complete: bool) -> None:
        """Update the running statistics with those of the batch, if all of it was computed."""
        for layer, sums in self._sums.items():
            layer.track_running_stats = True
            for of_call in sums if is_complete else ():
                of_call.update(layer)
        self._sums = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Context of a forward of a training step, and not of its recomputation."""
        self._is_collecting = True
        self._calls.clear()
        try:
            yield
        finally:
            self._is_collecting = False

    def _collect(self, layer: Any, inputs: Any, *_: Any) -> None:
        if self._is_collecting and layer in self._sums:
            sums = self._sums[layer]
            if self._calls[layer] == len(sums):
                sums.append(_Sums())
            sums[self._calls[layer]].add(_own_channels(layer, inputs[0]))
            self._calls[layer] += 1


@torch.no_grad()
def _own_channels(layer: _BatchNorm, values: torch.Tensor) -> torch.Tensor:
    """Return the channels whose running statistics this rank of the tensor axis holds."""
    running = layer.running_mean
    if isinstance(running, SplitTensor):
        return piece_at(values, 1, Split(1, running.division.blocks), running.axis)
    whole: torch.Tensor = whole_outputs(values)
    return whole


class _Sums:
    """Number, mean and squared deviations of the values of each channel."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Any = 0.0
        self.squares: Any = 0.0

    @torch.no_grad()
    def add(self, values: torch.Tensor) -> None:
        """Add the values of a micro-batch: pairwise, which loses no digits (Chan et al.)."""
        own = values.detach().double().transpose(0, 1).flatten(1)
        count, mean = own.size(1), own.mean(1)
        squares = (own - mean[:, None]).square().sum(1)
        total, delta = self.count + count, mean - self.mean
        self.squares = self.squares + squares + delta.square() * (self.count * count / total)
        self.mean = self.mean + delta * (count / total)
        self.count = total

    @torch.no_grad()
    def update(self, layer: _BatchNorm) -> None:
        factor = next_factor(layer)
        variance = self.squares / max(self.count - 1, 1)
        for name, new in (("running_mean", self.mean), ("running_var", variance)):
            running = layer._buffers[name]  # of this rank's channels
            if running is not None:
                running.lerp_(new.to(running.dtype), factor)
