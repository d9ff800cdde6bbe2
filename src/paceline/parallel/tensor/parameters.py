"""Parameters and buffers of which a rank holds a piece, and recurrent layers of such parameters.

The parameter stays the same object, of the piece's shape, so that optimizers, clipping, replicas
and hooks work with plain tensors. What the module's code reads as ``self.weight`` is the split
tensor: the module gets a class with a property of that name.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ...checkpoint.sharded_tensor import is_sharded
from .exchange import TensorAxis, gathered, scattered, shared
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
            return gathered(piece, split, self.axis)
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
                    made[id(piece)] = gathered(piece, split, self.axis)
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


# Recurrent layers whose hidden units are divided over the ranks.
#
# Each rank computes the gates of its hidden units. Ranks gather the hidden state after each time
# step, so a layer needs one exchange for each time step in forward and one in backward.


def gates_of(module: nn.RNNBase) -> int:
    """Return the number of gates, which are blocks of the weights."""
    return {"LSTM": 4, "GRU": 3}.get(module.mode, 1)


def weight_names(module: nn.RNNBase) -> list[list[str]]:
    """Return the names of the weights of each layer and direction."""
    kinds = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if module.bias else [])]
    ways = ["", "_reverse"] if module.bidirectional else [""]
    layers = range(module.num_layers)
    return [[f"{kind}_l{i}{way}" for kind in kinds] for i in layers for way in ways]


def split_recurrent(
    kind: type[nn.Module], splits: Mapping[str, Split], views: Views
) -> Callable[..., Any]:
    """Return the forward of a recurrent layer with these splits."""

    def forward(self: nn.RNNBase, x: Any, hx: Any = None) -> Any:  # module_name() sees self
        usual = isinstance(x, torch.Tensor) and x.dim() == 3 and not self.proj_size
        if views.are_whole or not usual:
            return _with_whole_weights(kind, self, splits, views, x, hx)
        return _Layers(self, views.axis).run(x, hx)

    return forward


def _with_whole_weights(
    kind: type[nn.Module],
    module: nn.RNNBase,
    splits: Mapping[str, Split],
    views: Views,
    x: Any,
    hx: Any,
) -> Any:
    own: Any = module._flat_weights
    names = [name for of in weight_names(module) for name in of]
    whole: list[Any] = []
    for name in names:
        piece = module._parameters[name]
        assert piece is not None
        is_whole = getattr(piece, "_paceline_whole", False)
        whole.append(piece if is_whole else gathered(piece, splits[name], views.axis))
    module._flat_weights = whole
    try:
        return kind.forward(module, x, hx)
    finally:
        module._flat_weights = own


class _Layers:
    """One forward of the layers of a module."""

    def __init__(self, module: nn.RNNBase, axis: TensorAxis) -> None:
        self.module, self.axis = module, axis
        self.directions = 2 if module.bidirectional else 1

    def run(self, x: torch.Tensor, hx: Any) -> Any:
        module = self.module
        x = x.whole() if isinstance(x, SplitTensor) else x
        x = x.transpose(0, 1) if module.batch_first else x
        is_lstm = module.mode == "LSTM"
        number = module.num_layers * self.directions
        if hx is None:
            zeros = x.new_zeros(number, x.shape[1], module.hidden_size)
            hx = (zeros, zeros) if is_lstm else zeros
        first = hx[0] if is_lstm else hx
        last: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for layer in range(module.num_layers):
            outputs = []
            for direction in range(self.directions):
                at = layer * self.directions + direction
                cell = hx[1][at] if is_lstm else None
                own = x.flip(0) if direction else x
                out, hidden, cell = self._layer(own, at, first[at], cell)
                outputs.append(out.flip(0) if direction else out)
                last.append((hidden, cell))
            x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
            if layer + 1 < module.num_layers:
                x = F.dropout(x, module.dropout, module.training and module.dropout > 0)
        hidden = torch.stack([state for state, _ in last])
        x = x.transpose(0, 1) if module.batch_first else x
        if not is_lstm:
            return x, hidden
        cells = torch.stack([state for _, state in last if state is not None])
        return x, (hidden, gathered(cells, Split(2), self.axis))

    def _layer(
        self, x: torch.Tensor, at: int, hidden: torch.Tensor, cell: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Run one direction of a layer: its outputs, hidden state, and this rank's cell state."""
        module, axis = self.module, self.axis
        names = weight_names(module)[at]
        weights = [module._parameters[name] for name in names]
        w_x, w_h = weights[:2]
        b_x, b_h = weights[2:4] if module.bias else (None, None)
        assert w_x is not None
        assert w_h is not None
        inputs = F.linear(shared(x, axis), w_x, b_x)
        own = _cut(hidden, axis)
        if cell is not None:
            cell = _cut(cell, axis)
        outputs = []
        for step in inputs.unbind(0):
            state = F.linear(shared(hidden, axis), w_h, b_h)
            own, cell = _cell(module, step, state, own, cell)
            hidden = gathered(own, Split(1), axis)
            outputs.append(hidden)
        return torch.stack(outputs), hidden, cell


def _cut(state: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    return scattered(state, Split(1), axis)


def _cell(
    module: nn.RNNBase, step: torch.Tensor, state: torch.Tensor, own: torch.Tensor, cell: Any
) -> tuple[torch.Tensor, Any]:
    """Return the hidden and cell state of this rank's units after a time step."""
    if module.mode == "LSTM":
        i, f, g, o = (step + state).chunk(4, 1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(cell), cell
    if module.mode == "GRU":
        r_x, z_x, n_x = step.chunk(3, 1)
        r_h, z_h, n_h = state.chunk(3, 1)
        z = torch.sigmoid(z_x + z_h)
        n = torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h)
        return (1 - z) * n + z * own, None
    return (torch.relu if module.mode == "RNN_RELU" else torch.tanh)(step + state), None
