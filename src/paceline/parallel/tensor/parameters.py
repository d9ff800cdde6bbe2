"""Parameters and buffers of which a rank holds a piece.

The parameter stays the same object, of the piece's shape, so that optimizers, clipping, replicas
and hooks work with plain tensors. What the module's code reads as ``self.weight`` is the split
tensor: the module gets a class with a property of that name.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...checkpoint.sharded_tensor import is_sharded
from . import exchange
from .exchange import TensorAxis
from .recurrent import split_recurrent
from .split_tensor import SplitTensor
from .splits import Split


class Views:
    """How the split parameters of one model appear in its forward.

    Attributes:
        axis: The ranks.
        are_whole: Whether they appear as whole tensors, so that each rank computes everything.
        divided: Modules, and names and splits of their tensors.
    """

    def __init__(self, axis: TensorAxis) -> None:
        self.axis = axis
        self.are_whole = False
        self.divided: list[tuple[nn.Module, str, Split]] = []

    def view(self, piece: torch.Tensor, split: Split) -> torch.Tensor:
        """Return what the module's code sees of a piece."""
        if is_sharded(piece) or getattr(piece, "_paceline_whole", False):
            return piece  # outside of a forward of FSDP, or within ``whole_tensors``
        if self.are_whole:
            return exchange.gathered(piece, split, self.axis)
        return SplitTensor.of(piece, split, self.axis)

    @contextmanager
    def whole_tensors(self) -> Iterator[None]:
        """Let modules hold whole tensors in place of pieces, also in ``parameters()``."""
        made: dict[int, torch.Tensor] = {}
        places: list[tuple[dict[str, Any], str, Any]] = []
        self.are_whole = True
        try:
            for module, name, split in self.divided:
                is_parameter = module._parameters.get(name) is not None
                own: dict[str, Any] = module._parameters if is_parameter else module._buffers
                piece: torch.Tensor = own[name]
                if id(piece) not in made:
                    made[id(piece)] = exchange.gathered(piece, split, self.axis)
                    made[id(piece)]._paceline_whole = True  # type: ignore[attr-defined]
                places.append((own, name, piece))
                own[name] = made[id(piece)]
            yield
        finally:
            self.are_whole = False
            for own, name, piece in places:
                own[name] = piece


def divide_module(module: nn.Module, splits: Mapping[str, Split], views: Views) -> None:
    """Cut parameters and buffers of a module, and let its code see split tensors."""
    for name, split in splits.items():
        views.divided.append((module, name, split))
        own: torch.Tensor | None = module._parameters.get(name)
        cut_tensor(own if own is not None else module._buffers[name], split, views.axis)
    space: dict[str, Any] = {name: _property(name, split, views) for name, split in splits.items()}
    kind = type(module)
    if isinstance(module, nn.RNNBase):
        space["forward"] = split_recurrent(kind, splits, views)
        space["flatten_parameters"] = lambda _: None  # cuDNN expects whole weights
    space |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = type(kind.__name__, (kind,), space)


def cut_tensor(tensor: torch.Tensor | None, split: Split, axis: TensorAxis) -> None:
    """Keep this rank's piece of a tensor, and of its gradient; without effect if it was cut."""
    if tensor is None or getattr(tensor, "_paceline_split", None) is not None:
        return
    tensor._paceline_split = split  # type: ignore[attr-defined]  # tied parameters are cut once
    gradient, tensor.grad = tensor.grad, None
    tensor.data = _piece(tensor.data, split, axis)
    if gradient is not None:
        tensor.grad = _piece(gradient, split, axis)


def _piece(whole: torch.Tensor, split: Split, axis: TensorAxis) -> torch.Tensor:
    cut = split.cut(whole, axis.rank, axis.size)
    return cut.clone(memory_format=torch.contiguous_format)  # the whole one is freed


def cut_states(optimizer: torch.optim.Optimizer, axis: TensorAxis) -> None:
    """Cut the states of split parameters that an optimizer has already."""
    for parameter, state in optimizer.state.items():
        split = getattr(parameter, "_paceline_split", None)
        if split is None:
            continue
        whole = split.whole_shape(parameter.shape, axis.size)
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and tuple(value.shape) == whole:
                state[name] = _piece(value, split, axis)


def _property(name: str, split: Split, views: Views) -> property:
    def get(module: nn.Module) -> Any:
        piece: torch.Tensor | None = module._parameters.get(name)
        if piece is None:
            piece = module._buffers.get(name)
        return None if piece is None else views.view(piece, split)

    return property(get)
