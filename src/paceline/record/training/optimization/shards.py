"""This rank's part of a parameter or gradient."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Shard:
    """The values that this rank holds.

    Attributes:
        values: The values.
        offset: Position of the first of them in the flattened whole tensor.
        shape: Shape of the whole tensor.
    """

    values: torch.Tensor
    offset: int
    shape: list[int]


def shard_of(tensor: torch.Tensor) -> Shard | str:
    """Return this rank's shard of a tensor; the reason if it is not contiguous in the whole."""
    if tensor.is_meta:
        return "without values, on the device meta"
    if not hasattr(tensor, "placements"):  # no DTensor
        if tensor.is_sparse:
            tensor = tensor.to_dense()
        if tensor.layout != torch.strided:
            return f"of layout {tensor.layout}"
        return Shard(tensor.detach(), 0, list(tensor.shape))
    whole: Any = tensor
    from torch.distributed.tensor import Shard as Sharded
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded = [one for one in whole.placements if isinstance(one, Sharded)]
    if any(one.is_partial() for one in whole.placements):
        return "a partial sum of ranks"
    if len(sharded) > 1 or any(one.dim != 0 for one in sharded):
        return "sharded in another dimension than the first"
    _, offsets = compute_local_shape_and_global_offset(
        whole.shape, whole.device_mesh, whole.placements
    )
    row = 1
    for size in whole.shape[1:]:
        row *= size
    first = offsets[0] if offsets else 0
    return Shard(whole._local_tensor.detach(), first * row, list(whole.shape))
