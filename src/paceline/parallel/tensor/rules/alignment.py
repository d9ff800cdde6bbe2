"""Give operands the division of the result."""

from collections.abc import Sequence
from typing import Any

import torch

from ..exchange import TensorAxis, scattered, shared, total, total_piece
from ..split_tensor import SplitTensor, as_whole
from ..splits import Split


def first_split(values: Sequence[Any]) -> SplitTensor:
    """Return the first split tensor of arguments."""
    return next(one for one in values if isinstance(one, SplitTensor))


def piece_at(value: torch.Tensor, dim: int | None, split: Split, axis: TensorAxis) -> torch.Tensor:
    """Return an operand's piece for a result that is divided like ``split``.

    Args:
        dim: The operand's dim that meets the divided one; None: it has none, or of extent 1.
    """
    if isinstance(value, SplitTensor):
        if dim is not None and value.division == Split(dim, split.blocks):
            return value.local
        if dim is None:
            return value.shared()
        value = value.whole()
    return shared(value, axis) if dim is None else scattered(value, split.at(dim), axis)


def wrap(found: Any, split: Split, axis: TensorAxis) -> Any:
    """Return results as split tensors."""
    if isinstance(found, torch.Tensor):
        return SplitTensor.of(found, split, axis)
    if isinstance(found, (tuple, list)):
        each = [wrap(one, split, axis) for one in found]
        return type(found)(*each) if hasattr(found, "_fields") else type(found)(each)
    return found


def whole_of(values: dict[str, Any]) -> dict[str, Any]:
    """Return options with whole tensors."""
    return {name: as_whole(value) for name, value in values.items()}


def summed(parts: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    """Return the sum of the ranks' tensors [batch, tokens, features].

    With a division of tokens (``TensorAxis.token_dim``), each rank gets the sum for its tokens.
    """
    dim = axis.token_dim
    if dim is None or parts.dim() != 3 or not Split(dim).divides(parts.shape[dim], axis.size):
        return total(parts, axis)
    return SplitTensor.of(total_piece(parts, Split(dim), axis), Split(dim), axis)
