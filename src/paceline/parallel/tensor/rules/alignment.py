"""Give results their division."""

from typing import Any

import torch

from ..exchange import TensorAxis, total, total_piece
from ..split_tensor import SplitTensor
from ..splits import Split


def wrap(found: Any, split: Split, axis: TensorAxis) -> Any:
    """Return results as split tensors."""
    if isinstance(found, torch.Tensor):
        return SplitTensor.of(found, split, axis)
    return type(found)(wrap(one, split, axis) for one in found)


def summed(parts: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
    """Return the sum of the ranks' tensors [batch, tokens, features].

    With a division of tokens (``TensorAxis.token_dim``), each rank gets the sum for its tokens.
    """
    dim = axis.token_dim
    if dim is None or parts.dim() != 3 or not Split(dim).divides(parts.shape[dim], axis.size):
        return total(parts, axis)
    return SplitTensor.of(total_piece(parts, Split(dim), axis), Split(dim), axis)
